"""The tutorials of the browser edition: after each cell that recorded something, one that opens what it recorded.

record    run a tutorial on this machine, and keep the traces of its runs (`recorder`)
add       put in the cells that open them, play them on other hardware, and need no PyTorch

A tutorial takes up to some minutes, so its traces are kept in build/lite/recorded, for as long as its code, mpkit's
version, the recorder and the format of traces are the same. Remove that folder to record all of them anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

import mpkit
from mpkit.trace.trace import VERSION

HERE = Path(__file__).parent
RECORDED = HERE.parents[1] / "build" / "lite" / "recorded"
SECONDS = 1200
"""Within which each cell has to end."""

START = """\
import sys

sys.path.insert(0, {folder!r})
from recorder import Recorder

_recorder = Recorder(get_ipython()).start()
"""

NOTE = """\
**In the browser** there is no PyTorch, so cells that import it or train fail here. Their outputs are those of a real
run, and below each of them a cell that begins with `# In the browser` opens what it recorded then: run it, change it,
and play the same run on other hardware.
"""


def record(path: Path) -> Path:
    """Return the folder with a tutorial's traces and their index, after running it if it changed."""
    book = nbformat.read(path, as_version=4)
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    recorder = (HERE / "recorder.py").read_text(encoding="utf-8")
    key = hashlib.sha256(json.dumps([mpkit.__version__, VERSION, recorder, code]).encode()).hexdigest()[:12]
    folder = RECORDED / f"{path.stem}-{key}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch, "traces")
        kept.mkdir()
        first = nbformat.v4.new_code_cell(START.format(folder=str(HERE)))
        last = nbformat.v4.new_code_cell(f"_recorder.save({str(kept)!r})")
        book.cells = [first, *book.cells, last]
        place = {"metadata": {"path": scratch}}
        NotebookClient(book, timeout=SECONDS, resources=place, store_widget_state=False).execute()
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(kept, folder)
    return folder


def add(book: Any, recorded: Path, name: str) -> None:
    """Put in the cells that open the traces, which lie in the site's folder `traces/name`."""
    index = json.loads((recorded / "index.json").read_text())
    if not index:
        return
    traces = [{**each, "file": f"traces/{name}/{n}.mpkit"} for n, each in enumerate(index, 1)]
    by_cell = {cell: list(some) for cell, some in groupby(traces, lambda each: each["cell"])}
    cells, number = [book.cells[0], nbformat.v4.new_markdown_cell(NOTE.strip(), id="in-the-browser")], 0
    for cell in book.cells[1:]:
        cells.append(cell)
        if cell.cell_type != "code":
            continue
        for n, source in enumerate(sources(by_cell.get(number, []), first=number == index[0]["cell"])):
            cells.append(nbformat.v4.new_code_cell(source, id=f"in-the-browser-{number}-{n}"))
        number += 1
    book.cells = cells


def sources(traces: list[dict[str, Any]], first: bool) -> Iterator[str]:
    """Yield the code of the cells after one that recorded these traces; the first ones are played elsewhere as well."""
    if not traces:
        return
    opened = {each["file"]: f'mk.open("{each["file"]}")' for each in traces}
    comments = {each["file"]: f"  # {each['plan']}" * bool(each["plan"]) for each in traces}
    if len(traces) == 1 or all(each["name"] for each in traces):
        names = [each["name"] or "run" for each in traces]
        lines = [f"{name} = {opened[file]}{comments[file]}" for name, file in zip(names, opened, strict=True)]
        shown = names[-1]
    else:
        lines = ["runs = [", *(f"    {opened[file]},{comments[file]}" for file in opened), "]"]
        shown = "runs[-1]"
    words = (
        "the runs that the cell above recorded" if len(traces) > 1 else "the run that the cell above recorded"
    )
    yield "\n".join([f"# In the browser: {words}", "import mpkit as mk", "", *lines, f"{shown}.timeline()"])
    if first:
        yield f'# In the browser: the same on eight A100s\n{shown}.timeline(hardware="8x-a100-nvlink")'

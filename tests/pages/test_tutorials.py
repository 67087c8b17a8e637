"""The fast cells of the tutorials. Those tagged "thorough" run with the whole notebooks (`make soak`).

CI runs the one with live views, and the soak runs all.

Of cells tagged "exact" no figure depends on the machine: what they print is what the notebook has stored. After a
change that is meant, `make notebooks` stores it anew.
"""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.limits import PROGRAM
from tests.pages.claims import refuted

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("name", [
    pytest.param(path.stem, marks=pytest.mark.slow if path.stem == "00-start-here" else pytest.mark.soak)
    for path in sorted(NOTEBOOKS.glob("*.ipynb"))
])  # fmt: skip
def test_fast_cells_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what is stored was computed by a CPU's kernels
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    book.cells = [cell for cell in book.cells if not has_tag(cell, "thorough")]
    assert sum(cell.cell_type == "code" for cell in book.cells) >= 4, "a tutorial has fast cells"
    stored = {cell.id: words(cell) for cell in book.cells if has_tag(cell, "exact")}
    assert all(stored.values()), "a cell that is exact prints something"
    NotebookClient(book, timeout=PROGRAM, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    printed = {cell.id: words(cell) for cell in book.cells if cell.id in stored}
    assert printed == stored, "make notebooks"


def tutorials() -> dict[str, list[Any]]:
    return {path.stem: nbformat.read(path, as_version=4).cells for path in sorted(NOTEBOOKS.glob("*.ipynb"))}


def test_tutorials_are_short_lessons_that_end_with_exercises() -> None:
    assert [name[:2] for name in tutorials()] == [f"{number:02}" for number in range(13)]
    assert {name: len(cells) for name, cells in tutorials().items() if len(cells) > 45} == {}
    assert [name for name, cells in tutorials().items() if cells[-1].id != "your-turn"] == []
    assert [name for name, cells in tutorials().items() for cell in cells if "<!--" in cell.source] == []


def test_tutorials_use_what_is_public() -> None:
    """`mpkit`, `mpkit.data` and `mpkit.models`, and nothing of examples/, which only a checkout has."""
    code = [
        (name, cell.source)
        for name, cells in tutorials().items()
        for cell in cells
        if cell.cell_type == "code"
    ]
    used = {(name, each) for name, source in code for each in IMPORT.findall(source)}
    assert {each for _, each in used} == {"mpkit", "mpkit.data", "mpkit.models"}, used


IMPORT = re.compile(r"^ *(?:from|import) ((?:mpkit|examples)[\w.]*)", re.M)


def has_tag(cell: Any, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def words(cell: Any) -> str:
    """Return what a cell printed and returned, as text."""
    texts = [
        output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    ]
    return "".join(texts)


# ---- What tutorials say of their figures holds for the outputs that are stored there; a claim that is wrong is found.

NAMES = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]


def cells_of(name: str) -> list[Any]:
    return list(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells)


@pytest.mark.parametrize("name", NAMES)
def test_claims_hold_for_what_is_stored(name: str) -> None:
    assert refuted(cells_of(name)) == []


PLANTED = {  # text, phrase, what holds, output
    "another number in the text": (
        "It takes 3 steps and 0.5 s.", "takes 3 steps", 'a == above.number(r"(\\d+) steps")',
        "4 steps in 0.5 s",
    ),
    "another number in the output": (
        "It takes three steps.", "takes three steps", 'a == above.number(r"(\\d+) steps")', "2 steps",
    ),
    "the relation is the other way round": (
        "ZeRO is faster than DDP.", "faster", 'above.row("ZeRO")[0] < above.row("DDP")[0]',
        "DDP   1.5 s\nZeRO  1.7 s",
    ),
    "a row that the output has not": (
        "ZeRO is faster than DDP.", "faster", 'above.row("ZeRO")[0] < above.row("DDP")[0]', "DDP   1.5 s",
    ),
    "against the exact clock": (
        "The bubble is a quarter.", "is a quarter", "mk.simulate(mk.Plan.gpipe(4, 8)).bubble == near(a)", "",
    ),
}  # fmt: skip


def notebook(text: str, claim: dict[str, str], output: str) -> list[Any]:
    code = nbformat.v4.new_code_cell("print()", outputs=[nbformat.v4.new_output("stream", text=output)])
    return [code, nbformat.v4.new_markdown_cell(text, metadata={"mpkit": {"claims": [claim]}})]


@pytest.mark.parametrize(("text", "phrase", "holds", "output"), PLANTED.values(), ids=PLANTED)
def test_a_wrong_claim_is_found(text: str, phrase: str, holds: str, output: str) -> None:
    assert len(refuted(notebook(text, {"phrase": phrase, "holds": holds}, output))) == 1


def test_a_true_claim_holds() -> None:
    text, phrase, holds, _ = PLANTED["another number in the text"]
    assert refuted(notebook(text, {"phrase": phrase, "holds": holds}, "3 steps in 0.5 s")) == []

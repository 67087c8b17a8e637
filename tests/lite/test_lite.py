"""The browser edition, from a plain file server: no request leaves it, and its notebooks do what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from nbformat import read
from playwright.sync_api import Locator, Page, expect, sync_playwright

from mpkit.course.catalogue import find

ROOT = Path(__file__).parents[2]
TESTED = ROOT / "build" / "lite" / "tested"
SCREENSHOTS = ROOT / "build" / "lite" / "screenshots"
FIRST_PICTURE = 20.0
"""Seconds from the page's address to the first timeline, on two cores that do nothing else."""

RUN_ALL = """() => {
  window.ran = undefined;
  window.jupyterapp.commands.execute('notebook:run-all-cells').then((ok) => { window.ran = ok; });
}"""

RUN_ONE = """([index, source]) => {
  const book = window.jupyterapp.shell.currentWidget.content;
  if (source !== null) book.widgets[index].model.sharedModel.setSource(source);
  book.activeCellIndex = index;
  window.ran = undefined;
  window.jupyterapp.commands.execute('notebook:run-cell').then((ok) => { window.ran = ok; });
}"""

ERRORS = """() => window.jupyterapp.shell.currentWidget.content.widgets
  .filter((cell) => cell.model.type === 'code')
  .flatMap((cell) => cell.model.outputs.toJSON())
  .filter((output) => output.output_type === 'error').map((output) => output.evalue)"""


class Quiet(SimpleHTTPRequestHandler):
    """A plain file server that prints no log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the site, built from the working tree as it is now."""
    subprocess.run([sys.executable, ROOT / "scripts" / "lite" / "build.py", "--out", TESTED], check=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(TESTED)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def start(site: str) -> Iterator[tuple[Page, float, list[str]]]:
    """The start notebook with every cell run, the seconds to its first picture, and requests to other servers."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium: run `make test-lite`, or set CHROMIUM=/path/to/chrome"
    elsewhere: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which(path) or path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60_000)
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((site, "data:", "blob:")) else elsewhere.append(asked.url)
            ),
        )
        begun = time.monotonic()
        open_notebook(page, site, "start.ipynb")
        page.evaluate(RUN_ALL)
        expect(page.locator(".mpkit-timeline").first).to_be_visible(timeout=60_000)
        seconds = time.monotonic() - begun
        page.wait_for_function("window.ran !== undefined")
        yield page, seconds, elsewhere
        browser.close()


def open_notebook(page: Page, site: str, path: str) -> None:
    """Open a notebook of the site, and wait for its kernel."""
    page.goto(f"{site}/lab/index.html?path={path}")
    page.wait_for_function(
        "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    )


def index_of(page: Page, code: str) -> int:
    """The index of the first code cell with this code."""
    where = "(code) => window.jupyterapp.shell.currentWidget.content.widgets.findIndex("
    index = page.evaluate(
        f"{where}(c) => c.model.type === 'code' && c.model.sharedModel.source.includes(code))", code
    )
    assert index >= 0, f"no cell has {code!r}"
    return int(index)


def run_cell(page: Page, index: int, source: str | None = None) -> None:
    """Run a cell, with other code if some is given."""
    page.evaluate(RUN_ONE, [index, source])
    page.wait_for_function("window.ran !== undefined")


def output_of(page: Page, code: str) -> Locator:
    """What the cell with this code shows, scrolled into view: JupyterLab draws no cell that is out of it."""
    index = index_of(page, code)
    page.evaluate("(i) => window.jupyterapp.shell.currentWidget.content.scrollToItem(i, 'start')", index)
    return page.locator(f'.jp-Cell[data-windowed-list-index="{index}"] .jp-OutputArea-output')


def picture(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


Start = tuple[Page, float, list[str]]


@pytest.mark.timeout(400)
def test_every_cell_runs_and_nothing_comes_from_another_server(start: Start) -> None:
    page, _, elsewhere = start
    picture(page, "start")
    assert page.evaluate(ERRORS) == []
    assert page.evaluate("window.ran") is True
    assert elsewhere == []


def test_the_first_picture_is_there_in_time(start: Start) -> None:
    _, seconds, _ = start
    print(f"first picture after {seconds:.1f} s")
    assert seconds < FIRST_PICTURE


def test_the_explorer_follows_its_slider(start: Start) -> None:
    page, _, _ = start
    output = output_of(page, "mk.explore")
    expect(output.get_by_text("33.0 s").first).to_be_visible()
    handle = output.get_by_role("slider", name="number of micro-batches m")
    box = handle.bounding_box()
    assert box
    page.mouse.move(box["x"] + 8, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(box["x"] + 30, box["y"] + 8)
    page.mouse.up()
    m = float(handle.get_attribute("aria-valuenow") or 0)
    assert m > 8
    seconds = f"{(m + 4 - 1) * (1 + 2):.1f} s"  # (m + p - 1)(F + B)
    expect(output.get_by_text(seconds).first).to_be_visible(timeout=20_000)
    picture(page, "explorer")


def test_a_stored_trace_is_replayed_on_other_hardware(start: Start) -> None:
    page, _, _ = start
    steps = []
    for code in ("mk.open(", "hardware="):
        output = output_of(page, code)
        expect(output.locator(".mpkit-timeline")).to_be_visible()
        steps.append(output.locator(".mpkit-figure", has_text="step time").inner_text())
    picture(page, "replayed")
    recorded, replayed = steps
    assert "ms" in recorded and "µs" in replayed


def test_what_fits_is_answered(start: Start) -> None:
    page, _, _ = start
    shown = output_of(page, "mk.fits").get_by_role("img").first
    expect(shown).to_have_attribute("alt", re.compile("fits 8x-a100-nvlink: .* GiB on rank 0"))
    picture(page, "fits")


def test_axe_finds_nothing_serious_in_what_mpkit_draws(start: Start) -> None:
    page, _, _ = start
    output_of(page, "mk.explore")
    expect(page.locator(".mpkit-timeline").first).to_be_visible()
    found: list[dict[str, Any]] = Axe().run(page, context=".jp-OutputArea-output").response["violations"]
    serious = [
        (each["id"], [node["target"] for node in each["nodes"]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_what_trains_is_refused_at_the_readers_line(start: Start) -> None:
    page, _, _ = start
    run_cell(page, index_of(page, "# mk.Cluster(ranks=4)"), "mk.Cluster(ranks=4)")
    [said] = page.evaluate(ERRORS)
    assert said.startswith("mk.Cluster needs PyTorch to run or read models, and this Python has none")
    output_of(page, "mk.Cluster(ranks=4)")
    picture(page, "refused")


@pytest.mark.timeout(400)
def test_a_tutorial_opens_what_its_cells_recorded(start: Start, site: str) -> None:
    page, _, elsewhere = start
    open_notebook(page, site, "03-zero.ipynb")
    code = (
        "# In the browser: the run that the cell above recorded",
        "# In the browser: the same on eight A100s",
    )
    steps = []
    for each in code:
        run_cell(page, index_of(page, each))
        output = output_of(page, each)
        expect(output.locator(".mpkit-timeline")).to_be_visible(timeout=60_000)
        steps.append(output.locator(".mpkit-figure", has_text="step time").inner_text())
    picture(page, "tutorial")
    recorded, replayed = steps
    assert "ms" in recorded and "µs" in replayed
    assert elsewhere == []


def test_each_tutorial_has_what_it_recorded(site: str) -> None:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        added = [
            cell
            for cell in read(TESTED / "files" / path.name, 4).cells
            if cell.id.startswith("in-the-browser-")
        ]
        named = re.findall(r'mk\.open\("(.*?)"\)', "\n".join(cell.source for cell in added))
        assert named, path.name
        assert all((TESTED / "files" / name).is_file() for name in named)
        assert len(named) == len(list((TESTED / "files" / "traces" / path.stem).iterdir()))


@pytest.mark.timeout(400)
def test_an_exercise_is_solved(start: Start, site: str) -> None:
    page, _, elsewhere = start
    entry = find("double-the-link")  # its runs are among the traces
    open_notebook(page, site, "exercises/9-reading-lab.ipynb")
    run_cell(page, index_of(page, "import mpkit as mk"))
    run_cell(page, index_of(page, 'return puzzle("double-the-link"'))
    answer, check = index_of(page, "seconds_of_a_step = {"), 'mk.check("double-the-link"'
    wrong = next(one for one in entry.exercise.mistakes if one.name == "halves-the-step").wrong
    for code, verdict in ((wrong, "not yet"), (entry.source.plain, "solved")):
        run_cell(page, answer, code)
        run_cell(page, index_of(page, check))
        expect(output_of(page, check).get_by_text(verdict).first).to_be_visible(timeout=60_000)
        picture(page, verdict.replace(" ", "-"))
    run_cell(page, index_of(page, "mk.progress()"))
    expect(output_of(page, "mk.progress()").get_by_text("Reading lab: 1 of 7")).to_be_visible()
    assert page.evaluate(ERRORS) == []
    assert elsewhere == []

"""The browser edition, from a plain file server: no request leaves it, and its start notebook does what it says."""

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
from playwright.sync_api import Locator, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "lite" / "screenshots"
FIRST_PICTURE = 20.0
"""Seconds from the page's address to the first timeline, on two cores that do nothing else."""

RUN_ALL = """() => {
  window.ran = undefined;
  window.jupyterapp.commands.execute('notebook:run-all-cells').then((ok) => { window.ran = ok; });
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
    folder = ROOT / "build" / "lite" / "tested"
    subprocess.run([sys.executable, ROOT / "scripts" / "lite" / "build.py", "--out", folder], check=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
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
        page.goto(f"{site}/lab/index.html?path=start.ipynb")
        page.wait_for_function(
            "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
        )
        page.evaluate(RUN_ALL)
        expect(page.locator(".mpkit-timeline").first).to_be_visible(timeout=60_000)
        seconds = time.monotonic() - begun
        page.wait_for_function("window.ran !== undefined")
        yield page, seconds, elsewhere
        browser.close()


def output_of(page: Page, code: str) -> Locator:
    """What the cell with this code shows, scrolled into view: JupyterLab draws no cell that is out of it."""
    where = "(code) => window.jupyterapp.shell.currentWidget.content.widgets.findIndex("
    index = page.evaluate(
        f"{where}(c) => c.model.type === 'code' && c.model.sharedModel.source.includes(code))", code
    )
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
    page.evaluate("""() => {
      const book = window.jupyterapp.shell.currentWidget.content;
      book.activeCellIndex = book.widgets.length - 1;
      book.activeCell.model.sharedModel.setSource('mk.Cluster(ranks=4)');
      window.ran = undefined;
      window.jupyterapp.commands.execute('notebook:run-cell').then(() => { window.ran = true; });
    }""")
    page.wait_for_function("window.ran !== undefined")
    [said] = page.evaluate(ERRORS)
    assert said.startswith("mk.Cluster needs PyTorch to run or read models, and this Python has none")
    output_of(page, "mk.Cluster(ranks=4)")
    picture(page, "refused")

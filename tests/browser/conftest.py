"""A headless Chromium, a JupyterLab, and pages that must not complain.

`make test-browser` names it in CHROMIUM, or installs Debian's; see scripts/chromium.sh.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests import limits
from tests.browser.lab import ENDED, RANKS, serve_lab

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SCREENSHOTS = Path(__file__).parent / "screenshots"

EVENT = 1000 * limits.EVENT  # Playwright counts milliseconds
expect.set_options(timeout=EVENT)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium: run `make test-browser`, or set CHROMIUM=/path/to/chrome"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which(path) or path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def new_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page; whatever it says on the console as an error, or throws, fails the test."""
    complaints: list[str] = []
    contexts = []

    def opened(**options: object) -> Page:
        context = chromium.new_context(**{"viewport": {"width": 1100, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(EVENT)
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def screenshot() -> Callable[[Page, str], None]:
    """Keeps what a page looks like in tests/browser/screenshots, to be looked at."""
    SCREENSHOTS.mkdir(exist_ok=True)

    def take(page: Page, name: str) -> None:
        page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)

    return take


@pytest.fixture(scope="session")
def jupyterlab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab of our own, on copies of the notebooks, that asks nothing and nobody."""
    home = tmp_path_factory.mktemp("jupyter")
    shutil.copytree(NOTEBOOKS, home / "notebooks", ignore=shutil.ignore_patterns(".*"))
    for cells in (
        "fast",
        "all",
    ):  # a copy each, and a folder: runs wait for files there, and the page saves it
        (home / "notebooks" / cells).mkdir()
        shutil.copy(NOTEBOOKS / "01-pipeline-bubbles.ipynb", home / "notebooks" / cells)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for name, cells in {"ended": ENDED, "ranks": RANKS}.items():
        book = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)], metadata=kernel)
        nbformat.write(book, home / "notebooks" / f"{name}.ipynb")
    with serve_lab(home) as address:
        yield address


@pytest.fixture
def lab_page(chromium: Browser) -> Iterator[Page]:
    """A page whose errors fail the test. JupyterLab itself warns of this and that."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(EVENT)
    errors: list[str] = []
    page.on("console", lambda m: errors.append(f"{m.text} ({m.location})") if m.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert errors == []

"""The built book on a plain file server, and a headless Chromium that asks nobody else."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

BOOK = Path(__file__).parents[2] / "build" / "book"


class Silent(SimpleHTTPRequestHandler):
    """A file server that prints no log."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="session")
def book() -> Path:
    assert (BOOK / "index.html").exists(), "no book: run `make test-book`, which builds it first"
    return BOOK


@pytest.fixture(scope="session")
def site(book: Path) -> Iterator[str]:
    """The address of the book."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(book)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium: run `make test-book`, or set CHROMIUM=/path/to/chrome"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which(path) or path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def new_page(chromium: Browser, site: str) -> Iterator[Callable[..., Page]]:
    """Opens a page; an error on its console, or a request to another server, fails the test."""
    complaints: list[str] = []
    contexts = []

    def opened(**options: object) -> Page:
        context = chromium.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith((site, "data:")) else complaints.append(r.url))
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []

"""What is in the book: every page and public name, no solution, no link that leads nowhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup

from mpkit import homes
from scripts.book.pages import ROOT, with_timeline
from scripts.book.timelines import SHOWN

EXERCISES = ROOT / "notebooks" / "exercises"


@cache
def parsed(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


@cache
def anchors(page: Path) -> frozenset[str]:
    return frozenset(str(node["id"]) for node in parsed(page).find_all(id=True))


def broken(book: Path, page: Path) -> list[str]:
    """Return what a page links to or loads, within the book, that is not there."""
    found = []
    for node in parsed(page).find_all(["a", "link", "script", "img", "iframe"]):
        link = urlsplit(str(node.get("href") or node.get("src") or ""))
        if link.scheme or link.netloc:
            continue
        target = (page.parent / unquote(link.path)).resolve() if link.path else page
        fragment = unquote(link.fragment)
        there = target.is_relative_to(book) and target.is_file()
        if not there or (target.suffix == ".html" and fragment and fragment not in anchors(target)):
            found.append(link.geturl())
    return found


def test_every_link_within_the_book_leads_somewhere(book: Path) -> None:
    pages = [page for page in book.rglob("*.html") if "_static" not in page.parts]
    assert len(pages) > 100
    assert {str(page.relative_to(book)): wrong for page in pages if (wrong := broken(book, page))} == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text('<h1 id="top">There</h1>')
    page = tmp_path / "page.html"
    page.write_text(
        '<a href="there.html#top"></a><a href="there.html#no"></a><img src="no.png"><a href="../x"></a>'
    )
    assert broken(tmp_path, page) == ["there.html#no", "no.png", "../x"]


def test_all_notebooks_guides_and_public_names_have_a_page(book: Path) -> None:
    for folder, pattern in {"notebooks": "*.ipynb", "notebooks/exercises": "*.ipynb", "docs": "*.md"}.items():
        sources = {path.stem for path in (ROOT / folder).glob(pattern)}
        assert sources == {path.stem for path in (book / folder).glob("*.html")}
    assert {f"mpkit.{name}" for name in homes()} == {path.stem for path in (book / "api").glob("*.html")}


def squeezed(text: str) -> str:
    """Return a text without its white space: a page breaks lines where it likes."""
    return "".join(text.split())


@pytest.mark.parametrize("name", sorted(path.stem for path in EXERCISES.glob("*.ipynb")))
def test_exercises_come_without_their_solutions(book: Path, name: str) -> None:
    asked, solved = (
        {
            squeezed(cell.source)
            for cell in nbformat.read(path, as_version=4).cells
            if cell.cell_type == "code"
        }
        for path in (EXERCISES / f"{name}.ipynb", EXERCISES / "solved" / f"{name}.ipynb")
    )
    text = squeezed(parsed(book / "notebooks" / "exercises" / f"{name}.html").get_text())
    assert solved - asked, "no cell is solved: this test would see nothing"
    assert {cell for cell in asked | solved if cell in text} == asked


def test_a_timeline_needs_the_cell_that_it_stands_below() -> None:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("other.timeline()")])
    with pytest.raises(ValueError, match=r"name another line in scripts/book/timelines\.py"):
        with_timeline(book, SHOWN[0], "naive")

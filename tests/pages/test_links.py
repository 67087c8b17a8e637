"""Links from the tutorials and the documentation lead somewhere: to a file that exists and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """Return a page's text, or that of a notebook's Markdown cells."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    book = nbformat.read(path, as_version=4)
    return "\n\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")


def without_code(text: str) -> str:
    """Return Markdown without its fenced blocks and code spans, in which brackets are no links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings as GitHub makes them: lower case, hyphens for spaces, no punctuation."""
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings(text)}


def broken(path: Path) -> list[str]:
    """Return the links of a page or notebook to a file, or to a heading of a page, that does not exist."""
    found = []
    for link in LINK.findall(without_code(prose(path))):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (path.parent / parts.path).resolve() if parts.path else path
        if not target.exists() or (
            target.suffix == ".md" and parts.fragment and parts.fragment not in anchors(prose(target))
        ):
            found.append(link)
    return found


@pytest.mark.parametrize(
    "path",
    [*TUTORIALS, *PAGES, ROOT / "README.md", ROOT / "notebooks" / "README.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken(path) == []


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_each_tutorial_links_its_words_to_the_glossary(path: Path) -> None:
    assert "../docs/glossary.md#" in prose(path)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_page_has_a_section_twice(path: Path) -> None:
    heads = headings(prose(path))
    assert sorted(heads) == sorted({*heads})

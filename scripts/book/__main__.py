"""Build the book: `python -m scripts.book`, or `make book`. The site is build/book; warnings are errors.

copy      all pages into build/book-sources: tutorials, exercises without solutions, guides, the book's own pages
build     the site, by Sphinx
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from string import Template

import nbformat
from sphinx.cmd.build import main as build_with_sphinx

from mpkit import homes

ROOT = Path(__file__).parents[2]


def copy_pages(to: Path) -> None:
    """Write every page of the book into the empty folder `to`, with the lists of the book's own pages filled in."""
    lists = {
        "tutorials": "\n".join(_copy_notebooks("notebooks", to)),
        "exercises": "\n".join(_copy_notebooks("notebooks/exercises", to)),
        "guides": "\n".join(f"docs/{path.stem}" for path in sorted((ROOT / "docs").glob("*.md"))),
        "names": "\n".join(f"   mpkit.{name}" for name in sorted(homes(), key=str.lower)),
    }
    shutil.copytree(ROOT / "docs", to / "docs", ignore=shutil.ignore_patterns("book"))
    shutil.copytree(ROOT / "docs" / "book", to, dirs_exist_ok=True)
    for page in to.glob("*.md"):
        page.write_text(Template(page.read_text(encoding="utf-8")).substitute(lists), encoding="utf-8")


def _copy_notebooks(folder: str, to: Path) -> list[str]:
    """Copy the notebooks of a folder; return their names as Sphinx has them, in the order of their numbers."""
    (to / folder).mkdir(parents=True)
    paths = sorted((ROOT / folder).glob("*.ipynb"), key=lambda path: int(path.name.split("-")[0]))
    for path in paths:
        book = nbformat.read(path, as_version=4)
        for cell in book.cells:
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    words = re.sub(r"[<>\s]+", " ", output.data.get("text/plain", "a picture")).strip()
                    cell.metadata["mystnb"] = {"image": {"alt": words}}
        nbformat.write(book, to / folder / path.name)
    return [f"{folder}/{path.stem}" for path in paths]


def main() -> int:
    """Build the book, and say where it is."""
    site, sources = ROOT / "build" / "book", ROOT / "build" / "book-sources"
    for folder in (site, sources):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    copy_pages(sources)
    strictly = ["-q", "-W", "--keep-going"]
    failed = build_with_sphinx(
        [*strictly, "-b", "html", "-d", f"{sources}/.doctrees", str(sources), str(site)]
    )
    if not failed:
        print(f"the book is {site}; to read it: python -m http.server --directory {site}")
    return failed


if __name__ == "__main__":
    sys.exit(main())

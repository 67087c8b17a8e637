"""The pages that Sphinx reads, put into one folder: notebooks and guides as they are, and the book's own around them.

notebooks    tutorials with interactive timelines, exercises without solutions; pictures get words that stand for them
guides       docs/*.md
own pages    docs/book, with their lists filled in
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from string import Template

import nbformat

from mpkit import homes
from scripts.book.timelines import SHOWN, Shown, frame

__all__ = ["copy_pages", "with_timeline"]

ROOT = Path(__file__).parents[2]


def copy_pages(to: Path, titles: dict[str, str]) -> None:
    """Write every page of the book into the folder `to`.

    Args:
        to: an empty folder.
        titles: the title of each recorded strategy.

    Raises:
        ValueError: a tutorial has no longer the cell below which a timeline stands.
    """
    tutorials = _copy_notebooks("notebooks", to, titles)
    exercises = _copy_notebooks("notebooks/exercises", to, {})
    guides = [f"docs/{path.stem}" for path in sorted((ROOT / "docs").glob("*.md"))]
    shutil.copytree(ROOT / "docs", to / "docs", ignore=shutil.ignore_patterns("book"))
    lists = {
        "tutorials": "\n".join(tutorials),
        "exercises": "\n".join(exercises),
        "guides": "\n".join(guides),
        "names": "\n".join(f"   mpkit.{name}" for name in sorted(homes(), key=str.lower)),
        "timeline": frame("gpipe", titles["gpipe"]),
        "timelines": frame("all", "each strategy, and schedules to try"),
    }
    shutil.copytree(ROOT / "docs" / "book", to, dirs_exist_ok=True)
    for page in to.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(Template(text).substitute(lists), encoding="utf-8")


def _copy_notebooks(folder: str, to: Path, titles: dict[str, str]) -> list[str]:
    """Copy the notebooks of a folder; return their names as Sphinx has them, by number."""
    (to / folder).mkdir(parents=True)
    names = []
    for path in sorted((ROOT / folder).glob("*.ipynb"), key=lambda path: int(path.name.split("-")[0])):
        book = nbformat.read(path, as_version=4)
        for shown in SHOWN:
            if shown.notebook == path.stem and shown.strategy in titles:
                with_timeline(book, shown, titles[shown.strategy])
        _describe_pictures(book)
        nbformat.write(book, to / folder / path.name)
        names.append(f"{folder}/{path.stem}")
    return names


def with_timeline(book: nbformat.NotebookNode, shown: Shown, title: str) -> None:
    """Add a run's interactive timeline to a notebook, below the cell that shows such a run."""
    at = [n for n, cell in enumerate(book.cells) if cell.cell_type == "code" and shown.after in cell.source]
    if not at:
        raise ValueError(
            f"notebooks/{shown.notebook}.ipynb has no cell with {shown.after!r}, below which the timeline of "
            f"{shown.strategy!r} should stand: name another line in scripts/book/timelines.py"
        )
    text = f"*{title} to zoom and to point at, recorded when this book was built:*\n\n"
    book.cells.insert(at[0] + 1, nbformat.v4.new_markdown_cell(text + frame(shown.strategy, title, "../")))


def _describe_pictures(book: nbformat.NotebookNode) -> None:
    """Give each picture the words that stand for it: what the cell's value prints as."""
    for cell in book.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                words = re.sub(r"[<>\s]+", " ", output.data.get("text/plain", "a picture")).strip()
                cell.metadata["mystnb"] = {"image": {"alt": words}}

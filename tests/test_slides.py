"""Slides of the tutorials: which cell begins one, and that a cell's own metadata count."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def slides() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "slides.py"))


def test_headings_begin_slides_and_what_does_not_fit_goes_below(slides: dict[str, Any]) -> None:
    long = "\n".join(["x = 1"] * 20)
    cells = [
        new_markdown_cell("# Bubbles\n\nA text."),
        new_code_cell("import torch", id="setup"),
        new_markdown_cell("## Cut"),
        new_code_cell("cut()", outputs=[new_output("stream", text="3 layers\n")]),
        new_markdown_cell("Then:"),
        new_code_cell(long),
        new_code_cell("more()"),
        new_code_cell(long),
    ]
    assert list(slides["slide_types"](cells)) == [
        "slide", "skip", "slide", "-", "subslide", "-", "-", "subslide"
    ]  # fmt: skip


def test_every_tutorial_becomes_a_page(slides: dict[str, Any], tmp_path: Path) -> None:
    for path in sorted((ROOT / "notebooks").glob("0[03]*.ipynb")):
        page = slides["write"](path, tmp_path, None).read_text(encoding="utf-8")
        assert page.count("<section>") > 20 and "max-height: 480px" in page
        assert "import mpkit as mk" not in page.partition("<section>")[2].partition("</section>")[0]


def test_what_a_cell_says_counts(slides: dict[str, Any], tmp_path: Path) -> None:
    book = new_notebook(cells=[new_markdown_cell("# A"), new_markdown_cell("left out")])
    book.cells[1].metadata["slideshow"] = {"slide_type": "skip"}
    nbformat.write(book, tmp_path / "a.ipynb")
    assert "left out" not in slides["write"](tmp_path / "a.ipynb", tmp_path, None).read_text()
    assert slides["mark"](tmp_path / "a.ipynb")
    assert not slides["mark"](tmp_path / "a.ipynb"), "marked already"

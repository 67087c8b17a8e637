"""Slides for a class from the tutorials, with reveal.js: `make slides`, into build/slides.

    type     which cell begins a slide: its metadata `slideshow` say so, or else the rule below; `--mark` writes them
    fit      pictures and code get as large as a slide of 1280 × 720 allows; what is longer scrolls
    write    nbconvert writes a page per tutorial, with the outputs that the notebook has stored

The rule: a heading begins a slide. Text and the code below it stay together, on the slide of what comes before if they
fit there, or else on one below it. The cell of imports is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from struct import unpack
from typing import Any

import nbformat
from nbconvert import SlidesExporter

ROOT = Path(__file__).parents[1]
HEIGHT = 620
"""The pixels of a slide that cells share."""
TEXT, CODE, PICTURE = 30, 22, 480
"""Pixels of a line of text, of a line of code, and of a picture at most."""
WIDE, WIDEST = 95, 1180
"""Characters of a line of text, pixels of a picture."""
SHORT = 200
"""A text of fewer pixels has no slide of its own: the code below it stays with it, and scrolls."""
STYLE = """<style>
.reveal .slides { text-align: left; font-size: 22px; }
.reveal h1 { font-size: 1.9em; } .reveal h2 { font-size: 1.5em; } .reveal h3 { font-size: 1.2em; }
.reveal .slides section { padding: 8px 20px; }
.reveal .slides img { max-height: 480px; max-width: 100%; width: auto; height: auto; margin: 4px 0; }
.reveal .slides pre, .reveal .slides .highlight pre {
  font-size: 15px; line-height: 1.35; box-shadow: none; width: 100%; margin: 0;
}
.reveal .slides table { font-size: 15px; }
.reveal .jp-InputPrompt, .reveal .jp-OutputPrompt { display: none; }
.reveal .jp-Cell { padding: 2px 0; }
</style>
"""


def slide_types(cells: list[Any]) -> Iterator[str]:
    """Yield reveal's type of each cell: "slide", "subslide", "-" (goes on), or "skip"."""
    used, before = 0, 0  # pixels of the slide so far, and of the text just above
    for number, cell in enumerate(cells):
        if cell.id == "setup":
            yield "skip"
            continue
        text = cell.cell_type == "markdown"
        following = [each for each in cells[number + 1 : number + 2] if text and each.cell_type == "code"]
        own, needed = height(cell), height(cell) + sum(map(height, following))
        if text and cell.source.lstrip().startswith("#"):
            kind = "slide"
        elif used + min(needed, HEIGHT) > HEIGHT and used and not (not text and 0 < before < SHORT):
            kind = "subslide"
        else:
            kind = "-" if number else "slide"
        used, before = used * (kind == "-") + own, own if text else 0
        yield kind


def height(cell: Any) -> int:
    """Return about how many pixels a cell needs on a slide."""
    lines = cell.source.splitlines()
    if cell.cell_type == "markdown":
        # a paragraph is filled anew
        paragraphs = cell.source.split("\n\n")
        return 20 + sum(TEXT * (1 + len(each) // WIDE) + 14 for each in paragraphs)
    return 16 + CODE * len(lines) + sum(_of_output(output) for output in cell.outputs)


def _of_output(output: Any) -> int:
    data = output.get("data", {})
    if "image/png" in data:
        wide, high = _size(data["image/png"])
        return 10 + min(PICTURE, high * min(WIDEST, wide) // wide)
    said = output.get("text") or data.get("text/markdown") or data.get("text/plain") or ""
    return CODE * len(str(said).splitlines())


def _size(encoded: str) -> tuple[int, int]:
    """Return the width and height of a PNG."""
    from base64 import b64decode

    wide, high = unpack(">II", b64decode(encoded[:64])[16:24])
    return wide, high


def mark(path: Path) -> bool:
    """Write the metadata `slideshow` of a notebook's cells by the rule; return whether anything changed."""
    book = nbformat.read(path, as_version=4)
    before = nbformat.writes(book)
    for cell, kind in zip(book.cells, slide_types(book.cells), strict=True):
        cell.metadata["slideshow"] = {"slide_type": kind}
    if nbformat.writes(book) == before:
        return False
    nbformat.write(book, path)
    return True


def write(path: Path, folder: Path, reveal: str | None) -> Path:
    """Write a notebook's slides, and return their path."""
    exporter = SlidesExporter(
        reveal_scroll=True, reveal_number="c/t", reveal_width="1280", reveal_height="720"
    )
    if reveal:
        exporter.reveal_url_prefix = f"{reveal}/reveal.js"
        exporter.require_js_url = f"{reveal}/require.js"
        exporter.jquery_url = f"{reveal}/jquery.js"
    book = nbformat.read(path, as_version=4)
    for cell, kind in zip(book.cells, slide_types(book.cells), strict=True):
        cell.metadata.setdefault("slideshow", {"slide_type": kind})
    html, _ = exporter.from_notebook_node(book, resources={"metadata": {"name": path.stem}})
    target = folder / f"{path.stem}.slides.html"
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(html.replace("</head>", STYLE + "</head>", 1), encoding="utf-8")
    return target


def main() -> None:
    """Mark tutorials, or write their slides."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="left out: all tutorials")
    parser.add_argument("--mark", action="store_true", help="write the cells' metadata, and no slides")
    parser.add_argument(
        "--reveal", help="folder or address with reveal.js/, require.js and jquery.js; left out: a CDN"
    )
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "slides")
    options = parser.parse_args()
    for path in options.notebooks or sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        if options.mark:
            print(f"{path}: {'marked' if mark(path) else 'as it was'}")
        else:
            print(write(path, options.output, options.reveal))


if __name__ == "__main__":
    main()

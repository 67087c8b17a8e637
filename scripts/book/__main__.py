"""Build the book: `python -m scripts.book`, or `make book`. The site is build/book; warnings are errors.

record    runs for the interactive timelines
copy      all pages into build/book-sources
build     the site, by Sphinx
"""

from __future__ import annotations

import shutil
import sys
import time

from sphinx.cmd.build import main as sphinx_build

from scripts.book.pages import ROOT, copy_pages
from scripts.book.timelines import record, write


def main() -> int:
    """Build it, and say where it is, how large, and how long it took."""
    site, sources = ROOT / "build" / "book", ROOT / "build" / "book-sources"
    began = time.monotonic()
    for folder in (site, sources):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    runs = record()
    write(runs, sources / "_extra" / "timelines")
    copy_pages(sources, {strategy: title for strategy, (title, _) in runs.items()})
    strictly = ["-q", "-W", "--keep-going"]
    failed = sphinx_build([*strictly, "-b", "html", "-d", f"{sources}/.doctrees", str(sources), str(site)])
    if failed:
        return failed
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    print(f"{site}: {size / 1e6:.0f} MB in {time.monotonic() - began:.0f} s")
    print(f"to read it: python -m http.server --directory {site}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

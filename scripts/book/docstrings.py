"""A Sphinx extension: drawings and tables in docstrings stay as they are.

mpkit's docstrings draw schedules and list words in columns. reStructuredText takes such lines for quotations or runs
them together, so they are marked as literal text here.
"""

from __future__ import annotations

import re
from itertools import groupby

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Examples?|Notes?):")
COLUMNS = re.compile(r"\S {3,}\S")


def literal_drawings(lines: list[str]) -> list[str]:
    """Return a docstring's lines with indented or columned paragraphs marked as literal.

    >>> literal_drawings(["Phases.", "", "send    to the next rank", "recv    from the one before", "", "So."])
    ['Phases.', '', '::', '', '    send    to the next rank', '    recv    from the one before', '', 'So.']
    """
    result: list[str] = []
    in_section = in_literal = False
    for blank, group in groupby(lines, key=lambda line: not line.strip()):
        block = list(group)
        if blank:
            result += block
            continue
        indented = block[0].startswith(" ")
        if not indented:
            in_section, in_literal = bool(SECTION.fullmatch(block[0].rstrip())), False
        if in_section or block[0].lstrip().startswith((">>>", "- ", "* ", "1. ", "|")):
            result += block
            continue
        columns = sum(bool(COLUMNS.search(line)) for line in block) >= 2
        if indented or columns:
            result += [] if in_literal else ["::", ""]
            in_literal = True
            result += block if indented else [f"    {line}" for line in block]
        else:
            result += block
    return result


def process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Mark the drawings of one docstring, before napoleon reads its sections."""
    lines[:] = literal_drawings(lines)


def skip(app: Sphinx, what: str, name: str, obj: object, skipped: bool, options: object) -> bool | None:
    """Leave out the fields of named tuples, whose docstrings Python writes: the class explains them."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def setup(app: Sphinx) -> ExtensionMetadata:
    """Read docstrings before napoleon does, and leave out what has none of its own."""
    app.connect("autodoc-process-docstring", process, priority=100)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

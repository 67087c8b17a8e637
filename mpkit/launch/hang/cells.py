"""Lines of notebook cells, as IPython spells them in its own tracebacks."""

from __future__ import annotations

import re
import sys

__all__ = ["in_cells"]


def in_cells(text: str) -> str:
    """Return the text with each place in a cell of this notebook spelled like "Cell In[3], line 7".

    >>> in_cells("rank 0 waits at train.py:7")
    'rank 0 waits at train.py:7'
    """
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    if shell is None:
        return text

    def name_cell(place: re.Match[str]) -> str:
        label = shell.compile.format_code_name(place[1])  # ("Cell", "In[3]"), or None for a file
        return f"{label[0]} {label[1]}, line {place[2]}" if label else place[0]

    return re.sub(r"(/\S+\.py|<[^<>\n]+>):(\d+)", name_cell, text)

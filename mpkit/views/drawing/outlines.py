"""Outlines over the rows of a picture; operations too narrow to see share one with their neighbours in the row.

A critical path may have thousands of operations on a few hundred pixels: an outline around each would be a black slab
that hides what it marks. `path.js` draws the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mpkit.common.safe_text import escape

NARROW = 6.0
"""Pixels: what is narrower shares an outline."""


@dataclass(frozen=True)
class Outline:
    """A box around one operation, or around several: pixels, and what it says when the pointer rests on it.

    Attributes:
        dashed: whether nothing happens within: a gap.
        count: how many operations it is around.
    """

    x: float
    width: float
    y: float
    height: float
    words: str = ""
    dashed: bool = False
    count: int = 1

    @property
    def end(self) -> float:
        """The x of its right side."""
        return self.x + self.width

    def svg(self) -> str:
        """Return it as an SVG element of class "path"."""
        dashes = ' stroke-dasharray="3 2"' if self.dashed else ""
        words = self.words if self.count == 1 else f"{self.count:,} operations, from {self.words}"
        hover = f"<title>{escape(words)}</title>" if self.words else ""
        return (
            f'<rect class="path" x="{self.x:.2f}" y="{self.y:g}" width="{max(self.width, 0.5):.2f}" '
            f'height="{self.height:g}"{dashes}' + (f">{hover}</rect>" if hover else "/>")
        )


def merge_outlines(boxes: Iterable[Outline]) -> list[Outline]:
    """Return the outlines, in the order of their starts or of a path; of neighbours in a row, narrow ones are one.

    >>> slim = [Outline(x, 1, 0, 9) for x in (0, 2, 4)]
    >>> [(box.x, box.width, box.count) for box in merge_outlines([*slim, Outline(40, 20, 0, 9), Outline(60, 20, 0, 9)])]
    [(0, 5, 3), (40, 20, 1), (60, 20, 1)]
    """
    found: list[Outline] = []
    for box in boxes:
        last = found[-1] if found else None
        slim = last is not None and (box.width < NARROW or last.width < NARROW or last.count > 1)
        if last is None or not slim or box.y != last.y or box.x - last.end > NARROW:
            found.append(box)
            continue
        width = max(box.end, last.end) - last.x
        found[-1] = replace(
            last, width=width, dashed=last.dashed and box.dashed, count=last.count + box.count
        )
    return found

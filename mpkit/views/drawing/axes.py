"""The colours of the mesh's axes, and their paler tints, shared by every picture of the mesh."""

from __future__ import annotations

from mpkit.plan.axes import TABLE
from mpkit.views.drawing.colours import BLACK, WHITE, luminance

__all__ = ["AXIS_INKS", "ink_of", "legible_on", "tint"]

AXIS_INKS = {axis.name: axis.ink for axis in TABLE}
"""By the axis' name."""

SEVERAL = "#8c6bb1"


def ink_of(axis: str) -> str:
    """Return the colour of an axis; all combinations of several axes share one colour."""
    return AXIS_INKS.get(axis, SEVERAL)


def tint(ink: str, share: float) -> str:
    """Return a colour between a pale version of `ink` (share 0) and `ink` itself (share 1).

    >>> tint("#0072b2", 1.0), tint("#0072b2", 0.0)
    ('#0072b2', '#bfdcec')
    """
    strength = 0.25 + 0.75 * min(max(share, 0.0), 1.0)
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02x}" for part in _parts(ink))


def legible_on(ink: str) -> str:
    """Return black or white, whichever is more legible on a colour.

    >>> legible_on("#0072b2"), legible_on("#ebf4f9")
    ('#ffffff', '#000000')
    """
    return WHITE if luminance(ink) < 0.1791 else BLACK  # equally far from both


def _parts(ink: str) -> list[int]:
    return [int(ink[at : at + 2], 16) for at in (1, 3, 5)]

"""The routes of tokens: a matrix of rows from rank to rank, and ribbons from a rank's tokens to the experts of ranks.

left       a box per rank, as high as it has rows
right      a box per expert, as high as it computes rows, those of one rank side by side
ribbons    from a rank to an expert, as thick as there are rows; those that stay on their rank are paler
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpkit.common.table import table_text
from mpkit.views.drawing.colours import ink_of
from mpkit.views.drawing.sheet import sheet
from mpkit.views.theme import MARGIN

if TYPE_CHECKING:
    from mpkit.timeline.traffic import TokenRoutes


TOP, TALL, GAP, APART, BOX, LABEL = 56.0, 240.0, 3.0, 12.0, 12.0, 64.0
"""Pixels: the upper edge, the height of all rows, gaps between boxes and between ranks, a box's width, a label's."""


def routes_text(routes: TokenRoutes) -> str:
    """Return the matrix: a line per rank with tokens, a column per rank with experts."""
    matrix = routes.matrix
    rows = [["", *(f"to {rank}" for rank in routes.ranks)]]
    rows += [
        [f"rank {rank}", *map("{:.0f}".format, row)] for rank, row in zip(routes.ranks, matrix, strict=True)
    ]
    rows.append(["computes", *map("{:.0f}".format, matrix.sum(axis=0))])
    head = f"Rows of {routes.layer} in step {routes.step}, from a rank's tokens to a rank's experts"
    lines = [head, *table_text(rows)]
    return "\n".join([*lines, f"{routes.moved_share:.0%} of the rows leave their rank"])


def routes_svg(routes: TokenRoutes, width: int = 720) -> str:
    """Draw the ribbons."""
    ranks, rows, total = routes.ranks, routes.rows, max(float(routes.rows.sum()), 1.0)
    scale = TALL / total
    left, right = MARGIN + LABEL, width - MARGIN - 2 * LABEL - 2 * BOX
    # ---- left: where each rank's rows begin
    begins = {rank: TOP + rows[:i].sum() * scale + i * (GAP + APART) for i, rank in enumerate(ranks)}
    # ---- right: experts by the rank that computes them
    columns = sorted({(owner, column) for owners in routes.owners for column, owner in enumerate(owners)})
    tops: dict[tuple[int, int], float] = {}
    y, parts, before = TOP, list[str](), columns[0][0]
    for owner, column in columns:
        y += APART * (owner != before)
        before = owner
        takes = [i for i in range(len(ranks)) if routes.owners[i][column] == owner]
        tall = float(rows[takes, column].sum()) * scale
        tops[owner, column] = y
        told = f"expert {column} on rank {owner} computes {rows[takes, column].sum():.0f} rows"
        parts.append(_box(right, y, tall, told))
        if tall >= 9:
            parts.append(_label(f"expert {column}", right + BOX + 6, y + tall / 2 + 4, "start"))
        y += tall + GAP
    bottom = max(y, max(begins.values()) + rows[-1].sum() * scale)
    # ---- ribbons
    ribbons: list[str] = []
    filled = dict(tops)
    for i, rank in enumerate(ranks):
        at = begins[rank]
        parts.append(_box(left - BOX, at, rows[i].sum() * scale, f"rank {rank} has {rows[i].sum():.0f} rows"))
        parts.append(_label(f"rank {rank}", left - BOX - 6, at + rows[i].sum() * scale / 2 + 4, "end"))
        for owner, column in sorted({(routes.owners[i][int(c)], int(c)) for c in np.flatnonzero(rows[i])}):
            thick, to = rows[i, column] * scale, filled[owner, column]
            told = f"{rows[i, column]:.0f} rows from rank {rank} to expert {column} on rank {owner}"
            ribbons.append(_ribbon(left, at, right, to, thick, told, stays=owner == rank))
            at, filled[owner, column] = at + thick, to + thick
    # ---- which rank has these experts
    for owner in dict.fromkeys(owner for owner, _ in columns):
        edges = [edge for each in columns if each[0] == owner for edge in (tops[each], filled[each])]
        parts.append(
            _label(f"rank {owner}", right + BOX + LABEL + 12, (min(edges) + max(edges)) / 2 + 4, "start")
        )
    title = f"Tokens of {routes.layer} in step {routes.step}"
    note = f"{routes.moved_share:.0%} of {total:.0f} rows leave their rank; pale: those that stay"
    return sheet("routes", title, str(routes), [*ribbons, *parts], width, bottom + 14, head=title, foot=note)


def _box(x: float, y: float, tall: float, told: str) -> str:
    shape = f'x="{x:g}" y="{y:.1f}" width="{BOX:g}" height="{max(tall, 0.5):.1f}"'
    return f'<rect class="words" {shape}><title>{told}</title></rect>'


def _label(words: str, x: float, y: float, anchor: str) -> str:
    return f'<text class="words" font-size="11" x="{x:g}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def _ribbon(x: float, y: float, to_x: float, to_y: float, thick: float, told: str, *, stays: bool) -> str:
    """Draw one ribbon, `thick` pixels at both ends."""
    half = (x + to_x) / 2
    there = f"M{x:g} {y:.1f}C{half:g} {y:.1f} {half:g} {to_y:.1f} {to_x:g} {to_y:.1f}"
    lower, to_lower = y + thick, to_y + thick
    back = f"V{to_lower:.1f}C{half:g} {to_lower:.1f} {half:g} {lower:.1f} {x:g} {lower:.1f}Z"
    shade = 0.2 if stays else 0.6
    return (
        f'<path fill="{ink_of("ep")}" fill-opacity="{shade}" d="{there}{back}"><title>{told}</title></path>'
    )

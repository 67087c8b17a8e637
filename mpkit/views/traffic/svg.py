"""A communication matrix as SVG: a heatmap per axis, a row per sender, a column per receiver."""

from __future__ import annotations

from math import ceil, log2, sqrt
from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.common.units import bytes_text
from mpkit.views.drawing.axes import ink_of, legible_on, tint
from mpkit.views.drawing.sheet import sheet
from mpkit.views.theme import MARGIN, THEMES
from mpkit.views.traffic.text import suitable_unit

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mpkit.timeline.traffic import CommMatrix

__all__ = ["traffic_svg"]

LABEL, GAP, TOP, HEAD = 30.0, 28.0, 46.0, 44.0
ACROSS, LARGEST = 3, 44.0


def traffic_svg(matrix: CommMatrix, width: int = 960) -> str:
    """Draw the heatmaps as a standalone SVG document; colours scale with the square root of the bytes.

    Args:
        matrix: what to draw.
        width: in pixels.
    """
    axes, n = matrix.axes, max(len(matrix.places), 1)
    across = min(max(len(axes), 1), ACROSS)
    room = (width - 2 * MARGIN - (across - 1) * GAP) / across - LABEL
    cell = min(room / n, LARGEST)
    tall = HEAD + cell * n + GAP
    highest = max((float(amounts.max()) for amounts in matrix.by_axis.values()), default=1.0)
    panels = []
    for number, axis in enumerate(axes):
        x = MARGIN + number % across * (LABEL + cell * n + GAP)
        y = TOP + number // across * tall
        panels.append(_panel(axis, ink_of(axis, matrix.mesh), matrix.by_axis[axis], (x, y), cell, highest))
    down = -(-len(axes) // across)
    height = TOP + down * tall + 14
    title = matrix.title
    note = "row: who sends; column: who receives; the stronger, the more" if axes else ""
    bare = {name: {"bare": f"fill:{theme.idle}"} for name, theme in THEMES.items()}
    return sheet(
        "traffic", title, str(matrix), panels, width, height - 24, head=title, foot=note, classes=bare
    )


def _panel(
    axis: str, ink: str, amounts: npt.NDArray[np.float64], corner: tuple[float, float], cell: float, highest: float
) -> str:  # fmt: skip
    """Draw one axis: its name and sum, the ranks on two sides, the cells."""
    n = len(amounts)
    factor, unit = suitable_unit(amounts)
    (x, y), side = corner, cell * n
    left, top = x + LABEL, y + HEAD
    every = max(1, 2 ** ceil(log2(24 / cell)))  # of many ranks, only some are numbered
    numbered = cell >= 28
    parts = [
        f'<text class="words" x="{left:g}" y="{y + 14:g}"><tspan font-weight="600">{escape(axis)}</tspan>'
        f'<tspan class="faint" dx="8">{bytes_text(float(amounts.sum()))}'
        f"{f', cells in {unit}' if numbered else ''}</tspan></text>",
        f'<rect class="bare" x="{left:.1f}" y="{top:.1f}" width="{side:.1f}" height="{side:.1f}" rx="3"/>',
    ]
    for rank in range(0, n, every):
        at = cell * (rank + 0.5)
        small = 'class="faint" font-size="11"'
        parts.append(
            f'<text {small} x="{left + at:.1f}" y="{top - 6:.1f}" text-anchor="middle">{rank}</text>'
            f'<text {small} x="{left - 6:.1f}" y="{top + at + 4:.1f}" text-anchor="end">{rank}</text>'
        )
    gap = 1.5 if cell > 12 else 0.3
    for row in range(n):
        for column in range(n):
            if value := float(amounts[row, column]):
                fill = tint(ink, sqrt(value / highest))
                place = left + cell * column, top + cell * row
                told = f"rank {row} to rank {column}: {bytes_text(value)}"
                parts.append(_cell(place, cell, gap, fill, f"{value / factor:.3g}" if numbered else "", told))
    return f'<g aria-label="{escape(axis)}">{"".join(parts)}</g>'


def _cell(place: tuple[float, float], cell: float, gap: float, fill: str, words: str, told: str) -> str:
    x, y = place
    drawn = (
        f'<rect fill="{fill}" x="{x + gap / 2:.1f}" y="{y + gap / 2:.1f}" width="{cell - gap:.1f}" '
        f'height="{cell - gap:.1f}" rx="{2 if cell > 12 else 0}"><title>{escape(told)}</title></rect>'
    )
    if words:
        drawn += (
            f'<text x="{x + cell / 2:.1f}" y="{y + cell / 2 + 3.5:.1f}" text-anchor="middle" font-size="10" '
            f'fill="{legible_on(fill)}" pointer-events="none">{words}</text>'
        )
    return drawn

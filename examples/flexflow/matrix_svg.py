"""A tensor as a matrix of squares, coloured by which of two ranks holds what; for SVG sheets."""

from __future__ import annotations

from itertools import pairwise

from mpkit.common.safe_text import escape
from mpkit.views.drawing.colours import INKS, Key

__all__ = ["BOTH", "Box", "both_ranks", "matrix", "rank_classes"]

Box = tuple[tuple[int, int], ...]
"""Which part of a tensor: the first index and the one after the last, by dimension."""

RANK_INKS = {
    theme: tuple(getattr(INKS[key], theme) for key in (Key.FORWARD, Key.BACKWARD))
    for theme in ("light", "dark")
}
"""Blue and orange, for the two ranks."""

CELL, MOST, APART = 9.0, 8, 4.0
"""Pixels of a number's square; the largest matrix side in squares; pixels between samples."""


def rank_classes() -> dict[str, dict[str, str]]:
    """Return by theme the classes r0 and r1, for the ranks, and comm, for what is sent."""
    comm = INKS[Key.COMM]
    return {
        name: {
            **{f"r{rank}": f"fill:{ink}" for rank, ink in enumerate(inks)},
            "comm": f"fill:{comm.light if name == 'light' else comm.dark}",
        }
        for name, inks in RANK_INKS.items()
    }


BOTH, STRIPES = 'fill="url(#mpkit-both)"', 'fill="url(#mpkit-stripes)"'


def both_ranks() -> str:
    """Return the patterns for what both ranks hold: a number is half of each colour, a larger area is striped."""
    return (
        '<defs><pattern id="mpkit-both" width="1" height="1" patternContentUnits="objectBoundingBox">'
        '<rect class="r0" width="1" height="1"/><path class="r1" d="M1 0V1H0Z"/></pattern>'
        '<pattern id="mpkit-stripes" width="12" height="12" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="r0" width="12" height="12"/>'
        '<rect class="r1" width="6" height="12"/></pattern></defs>'
    )


def matrix(
    name: str, shape: tuple[int, ...], held: list[Box | None], x: float, y: float, cell: float = CELL
) -> tuple[str, float, float]:
    """Draw a tensor as a matrix, with its name above; returns the elements, the width, and the y of the lower edge.

    Args:
        name: the tensor's name; without one it gets no label.
        shape: the shape of the whole tensor: (samples, rows, columns), (rows, columns) or (columns,).
        held: by rank, which part it has; None: nothing of it.
        x, y: the upper left corner, in pixels.
        cell: the size of a number's square, in pixels.
    """
    *lead, columns = shape
    samples, rows = (lead[0], lead[1]) if len(lead) == 2 else (1, lead[0] if lead else 1)
    across = min(cell, MOST * cell / columns)
    down = min(cell, MOST * cell / (samples * rows))
    each = across == cell == down  # else there are too many numbers to draw each
    apart = APART if samples <= 8 else 0.0
    both = BOTH if each else STRIPES
    size = f"{samples * rows} × {columns}" if len(shape) > 1 else f"{columns}"
    label = (
        f'<text class="words" x="{x:g}" y="{y - 5:g}" font-size="12" font-style="italic">{name}'
        f'<tspan class="faint" dx="5" font-size="10" font-style="normal">{size}</tspan></text>'
    )
    parts = [label] if name else []
    boxes = [None if box is None else _fill_box(box) for box in held]
    for sample in range(samples):
        top = y + sample * (rows * down + apart)
        row_edges = _edges([box[1] for box in boxes if box], rows, each)
        column_edges = _edges([box[2] for box in boxes if box], columns, each)
        for (r, r_end), (c, c_end) in ((r, c) for r in row_edges for c in column_edges):
            holders = [rank for rank, box in enumerate(boxes) if box and _has(box, (sample, r, c))]
            look = both if len(holders) > 1 else f'class="r{holders[0]}"' if holders else 'class="faint"'
            wide, tall = (c_end - c) * across, (r_end - r) * down
            parts.append(
                f'<rect {look} x="{x + c * across:.2f}" y="{top + r * down:.2f}" '
                f'width="{wide - min(0.9, 0.1 * wide):.2f}" height="{tall - min(0.9, 0.1 * tall):.2f}"/>'
            )
    owners = ", ".join(f"rank {rank}: {_words(box)}" for rank, box in enumerate(held))
    told = f"<title>{escape(f'{name} {list(shape)}; {owners}')}</title>"
    bottom = y + samples * rows * down + (samples - 1) * apart
    return f"<g>{told}{''.join(parts)}</g>", columns * across, bottom


def _fill_box(box: Box) -> Box:
    """Extend a box to three dimensions."""
    return ((0, 1),) * (3 - len(box)) + box


def _has(box: Box, at: tuple[int, int, int]) -> bool:
    return all(start <= place < end for (start, end), place in zip(box, at, strict=True))


def _edges(ranges: list[tuple[int, int]], size: int, each: bool) -> list[tuple[int, int]]:
    """Return the pieces in which a dimension is drawn: every number or, if there are many, the parts of the ranks."""
    edges = range(size + 1) if each else sorted({0, size, *(edge for pair in ranges for edge in pair)})
    return list(pairwise(edges))


def _words(box: Box | None) -> str:
    return "none" if box is None else "[" + ", ".join(f"{start}:{end}" for start, end in box) + "]"

"""An equation of matrices, coloured by which of two ranks holds what, to explain how a layer is divided.

    X · A = Y        ("X", 6, 4), "·", ("A", 4, 8, "columns"), "=", ("Y", 6, 8, "columns")

A matrix is given by its name, rows, columns, and how the ranks hold it:

    both       each rank has all of it
    columns    rank 0 has the left half, rank 1 the right one
    rows       rank 0 has the upper half, rank 1 the lower one
    sum        each rank has a matrix of this shape, and the whole is their sum: drawn one behind the other

The sign ⇄ marks where something is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from mpkit.common.display import DrawnResult
from mpkit.common.safe_text import escape
from mpkit.views.drawing.matrix_svg import BOTH, Box, both_ranks, matrix, rank_classes
from mpkit.views.drawing.sheet import keys, sheet
from mpkit.views.theme import MARGIN

__all__ = ["Matrices", "matrices", "picture"]

Shape: TypeAlias = "tuple[str, int, int] | tuple[str, int, int, str]"
WAYS = ("both", "columns", "rows", "sum")
HEAD, CELL, BEHIND, LETTER = 76.0, 13.0, 13.0, 8.4
"""Pixels: the height above the matrices, a number's square, the offset between the two of a sum, a sign's letter."""


@dataclass(frozen=True, repr=False)
class Matrices(DrawnResult):
    """A line of matrices and signs; a notebook shows its picture.

    Attributes:
        title: the title of the picture.
        line: name, rows, columns and way of each matrix, and the signs between them.
    """

    title: str
    line: tuple[tuple[str, int, int, str] | str, ...]
    _wraps = False

    def _words(self) -> str:
        return f"{self.title}: {self}"

    def __str__(self) -> str:
        return " ".join(one if isinstance(one, str) else _words(*one) for one in self.line)

    __repr__ = __str__


def matrices(*line: Shape | str, title: str) -> Matrices:
    """Draw an equation of matrices.

    >>> matrices(("X", 6, 4), "·", ("A", 4, 8, "columns"), "=", ("Y", 6, 8, "columns"), title="By columns")
    X [6, 4] on both ranks · A [4, 8] by columns = Y [6, 8] by columns

    Args:
        line: matrices, each (name, rows, columns) or (name, rows, columns, way), and signs between them.
        title: the title that is drawn above.

    Raises:
        ValueError: there is no such way, or a half would not be a whole number.
    """
    return Matrices(title, tuple(one if isinstance(one, str) else _check_matrix(*one) for one in line))


def _check_matrix(name: str, rows: int, columns: int, way: str = "both") -> tuple[str, int, int, str]:
    given = f"matrices(({name!r}, {rows}, {columns}, {way!r}))"
    if way not in WAYS:
        raise ValueError(f"{given}: ranks have a matrix in one of the ways {', '.join(map(repr, WAYS))}")
    divided = {"columns": columns, "rows": rows}.get(way, 0)
    if divided % 2:
        raise ValueError(f"{given}: two ranks have halves, of {divided + 1} {way}, say")
    return name, rows, columns, way


def _words(name: str, rows: int, columns: int, way: str) -> str:
    how = {"both": "on both ranks", "sum": "a sum, of one on each rank"}.get(way, f"by {way}")
    return f"{name} [{rows}, {columns}] {how}"


def picture(drawn: Matrices) -> str:
    """Return the SVG of a line of matrices and signs."""
    legend = keys(
        (('class="r0"', "rank 0"), ('class="r1"', "rank 1"), (BOTH, "both ranks")), 38, float("inf")
    )
    end = legend.x
    body = [both_ranks(), *legend.parts]
    body.append(f'<text class="comm" x="{end:g}" y="49" font-size="15" font-weight="700">⇄</text>')
    body.append(f'<text class="words" x="{end + 20:g}" y="48.5">here something is sent</text>')
    tallest = max((one[1] for one in drawn.line if not isinstance(one, str)), default=1) * CELL
    x = MARGIN
    for one in drawn.line:
        if isinstance(one, str):
            wide = LETTER * len(one) + 22
            look = 'class="comm" font-weight="700"' if "⇄" in one else 'class="words"'
            body.append(
                f'<text {look} x="{x + wide / 2:.1f}" y="{HEAD + tallest / 2 + 5:.1f}" text-anchor="middle" '
                f'font-size="15">{escape(one)}</text>'
            )
            x += wide
        else:
            parts, wide = _draw_matrix(*one, x, HEAD + (tallest - one[1] * CELL) / 2)
            body += parts
            x += wide
    width = max(x, end + 170.0) + MARGIN
    return sheet(
        "matrices",
        drawn.title,
        str(drawn),
        body,
        width,
        HEAD + tallest + 22,
        head=drawn.title,
        classes=rank_classes(),
    )


def _draw_matrix(name: str, rows: int, columns: int, way: str, x: float, y: float) -> tuple[list[str], float]:
    """Draw one matrix; returns its elements and its width."""
    all_of_it: Box = ((0, rows), (0, columns))
    if way == "sum":
        behind = matrix("", (rows, columns), [None, all_of_it], x + BEHIND, y + BEHIND, CELL)[0]
        front, wide, _ = matrix(name, (rows, columns), [all_of_it, None], x, y, CELL)
        return [behind, front], wide + BEHIND
    held: list[Box | None] = [all_of_it, all_of_it]
    if way == "columns":
        held = [((0, rows), (0, columns // 2)), ((0, rows), (columns // 2, columns))]
    if way == "rows":
        held = [((0, rows // 2), (0, columns)), ((rows // 2, rows), (0, columns))]
    drawn, wide, _ = matrix(name, (rows, columns), held, x, y, CELL)
    return [drawn], wide

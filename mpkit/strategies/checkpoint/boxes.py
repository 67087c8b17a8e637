"""Boxes: where a rank's elements of a parameter lie in the whole parameter.

Every whole parameter is treated as a matrix: its first dimensions together count the rows, the others the columns, so
that it is as square as possible. Tensor and expert parallelism give a rank some rows or columns of it (`Shard`), and
ZeRO a range of those, flattened. Together that is a few boxes of the whole:

    whole, 6 x 4      columns 1 and 2 are local,       of these elements 1 to 8 are here:
                      flattened 6 x 2 = 12
      . . . .           . 0 1 .                          . . a .         a   part of a row
      . . . .           . 2 3 .                          . b b .
      . . . .           . 4 5 .                          . b b .         b   whole rows
      . . . .           . 6 7 .                          . b b .
      . . . .           . 8 9 .                          . c . .         c   part of a row
      . . . .           . . . .                          . . . .

Several ranges of rows or columns (a fused q, k and v) cut a box where one range ends and the next begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from mpkit.strategies.stage.shard import Shard

__all__ = ["ParameterBox", "boxes_of", "disjoint", "end_of_rows", "rows_and_columns", "tile"]


class ParameterBox(NamedTuple):
    """Rows `top` to `bottom` and columns `left` to `right` of a whole parameter, the last ones not included."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return self.bottom - self.top, self.right - self.left

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.sizes)


def rows_and_columns(shape: Sequence[int], rows: int = 0) -> tuple[int, int]:
    """Return a shape as that of a matrix.

    >>> rows_and_columns((6, 4, 3, 3)), rows_and_columns((8, 64, 32)), rows_and_columns((6,)), rows_and_columns(())
    ((24, 9), (512, 32), (6, 1), (1, 1))

    Args:
        shape: the shape of the parameter.
        rows: the number of rows, of those that the first dimensions can have; 0: of the most square matrix.
    """
    at = end_of_rows(shape, rows)
    return prod(shape[:at]), prod(shape[at:])


def end_of_rows(shape: Sequence[int], rows: int) -> int:
    """Return how many dimensions together count the rows; the arguments are those of `rows_and_columns`."""
    if len(shape) < 2:
        return len(shape)
    ends = range(1, len(shape))
    if rows:
        return next((at for at in ends if prod(shape[:at]) == rows), 1)
    return min(ends, key=lambda at: max(prod(shape[:at]), prod(shape[at:])))


def boxes_of(
    whole: Sequence[int], shard: Shard | None, start: int, end: int, rows: int = 0
) -> list[tuple[ParameterBox, int]]:
    """Return where elements `start` to `end` of a flattened local parameter lie in the whole parameter.

    >>> shard = Shard((6, 4), 1, (range(1, 3),))
    >>> for box, first in boxes_of((6, 4), shard, 1, 9):
    ...     print(tuple(box), first)
    (0, 2, 1, 3) 1
    (1, 1, 4, 3) 2
    (4, 1, 5, 2) 8

    Args:
        whole: shape of the whole parameter.
        shard: the part of it that is local; None if all of it is.
        start, end: range of elements of the local parameter, not empty.
        rows: as for `rows_and_columns`.

    Returns:
        The boxes, each with the index of its first element in the local parameter.
    """
    at = end_of_rows(whole, rows)
    width = prod((shard.shape if shard else whole)[at:])
    by_dim = [(range(size),) for size in whole] if shard is None else shard.ranges_by_dim
    above = _flatten_ranges(whole[:at], by_dim[:at])
    left = _flatten_ranges(whole[at:], by_dim[at:])
    return [
        (ParameterBox(over.start, beside.start, over.stop, beside.stop), row * width + column)
        for box in _of_range(start, end, width)
        for over, row in _cut(above, box.top, box.bottom)
        for beside, column in _cut(left, box.left, box.right)
    ]


def _flatten_ranges(sizes: Sequence[int], by_dim: Sequence[Sequence[range]]) -> list[range]:
    """Return the ranges of flattened dimensions, from those of each of them.

    >>> _flatten_ranges((2, 6), ((range(2),), (range(1, 3),)))
    [range(1, 3), range(7, 9)]
    """
    found = [range(1)]
    for size, ranges in zip(sizes, by_dim, strict=True):
        if list(ranges) == [range(size)]:
            found = [range(part.start * size, part.stop * size) for part in found]
        else:
            found = [
                range(i * size + part.start, i * size + part.stop)
                for outer in found
                for i in outer
                for part in ranges
            ]
    return found


def _of_range(start: int, end: int, width: int) -> Iterator[ParameterBox]:
    """Yield the boxes of a range of a flattened matrix: part of a row, whole rows, part of a row."""
    (top, left), (bottom, right) = divmod(start, width), divmod(end, width)
    if top == bottom:
        yield ParameterBox(top, left, top + 1, right)
        return
    if left > 0:
        yield ParameterBox(top, left, top + 1, width)
        top += 1
    if top < bottom:
        yield ParameterBox(top, 0, bottom, width)
    if right > 0:
        yield ParameterBox(bottom, 0, bottom + 1, right)


def _cut(ranges: Sequence[range], start: int, end: int) -> Iterator[tuple[range, int]]:
    """Yield local rows or columns as ranges of the whole parameter's, each with its first local one."""
    begins = accumulate(map(len, ranges), initial=0)
    for part, begin in zip(ranges, begins, strict=False):
        first, last = max(start, begin), min(end, begin + len(part))
        if first < last:
            yield range(part.start + first - begin, part.start + last - begin), first


# ---- many of them ------------------------------------------------------------------------------------------------


def tile(boxes: Sequence[ParameterBox], rows: int, columns: int) -> bool:
    """Return whether the boxes cover a whole matrix, each element once.

    >>> [tile([ParameterBox(0, 0, 2, 1), ParameterBox(0, 1, below, 3)], 2, 3) for below in (2, 1)]
    [True, False]
    """
    inside = all(0 <= b.top < b.bottom <= rows and 0 <= b.left < b.right <= columns for b in boxes)
    return inside and sum(box.numel for box in boxes) == rows * columns and disjoint(boxes)


def disjoint(boxes: Iterable[ParameterBox]) -> bool:
    """Return whether no element is in two of the boxes, none of which is empty.

    A sweep down the rows holds a box's columns from its top to its bottom: boxes that overlap want the same column.
    """
    edges = [(edge, begins, box) for box in boxes for edge, begins in ((box.top, True), (box.bottom, False))]
    taken: list[tuple[int, int]] = []  # ranges of columns, from left to right
    for _, begins, box in sorted(edges):  # boxes that end in a row leave before others enter
        columns = (box.left, box.right)
        at = bisect_left(taken, columns)
        if not begins:
            del taken[at]
            continue
        if (at > 0 and taken[at - 1][1] > box.left) or (at < len(taken) and taken[at][0] < box.right):
            return False
        taken.insert(at, columns)
    return True

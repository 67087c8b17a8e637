"""A schedule drawn in text: over time, or as it is written, with an arrow at one action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpkit.plan.schedule.action import Action
from mpkit.plan.schedule.play import SLOTS, play

if TYPE_CHECKING:
    from mpkit.plan.schedule.core import Schedule

__all__ = ["draw", "draw_rows"]


def draw(schedule: Schedule, slots: Mapping[str, float] = SLOTS) -> str:
    """Draw the schedule over time, one column per slot. Dots are idle slots; dashes continue the action before them.

    Where a rank holds several stages, the stage is named too: `2F0`. A schedule that cannot finish is drawn up to the
    point where it is stuck.

    Args:
        schedule: the schedule to draw.
        slots: the number of slots for each kind of action, whole numbers.
    """
    placed = play(schedule, slots).placed
    plain = schedule.stage_to_rank == tuple(range(schedule.ranks))
    width = max((len(_label(action, plain)) for s, e, _, action in placed if e > s), default=1)
    columns = round(max((end for _, end, *_ in placed), default=0))
    cells = [[".".rjust(width)] * columns for _ in range(schedule.ranks)]
    for start, end, rank, action in placed:
        for column in range(round(start), round(end)):
            cells[rank][column] = "-" * width
        if end > start:
            cells[rank][round(start)] = _label(action, plain).rjust(width)
    return "\n".join(f"{_rank(schedule, rank)} | {' '.join(row)}" for rank, row in enumerate(cells))


def draw_rows(schedule: Schedule, *arrows: tuple[int, int]) -> str:
    """Draw the rows as they are written, one column per position, with an arrow under each given (rank, position).

    >>> from mpkit.plan.schedule import Schedule
    >>> print(draw_rows(Schedule(["0F0 0B0", "1F0 1B0"]), (1, 1)))
    rank 0 | 0F0 0B0
    rank 1 | 1F0 1B0
                 ^^^
    """
    width = max((len(str(action)) for row in schedule.rows for action in row), default=1)
    first, last = _window(max(map(len, schedule.rows), default=0), [position for _, position in arrows])
    lines = []
    for rank, row in enumerate(schedule.rows):
        head = f"{_rank(schedule, rank)} | {'... ' if first else ''}"
        more = " ..." if len(row) > last else ""
        lines.append(
            (head + " ".join(str(action).rjust(width) for action in row[first:last])).rstrip() + more
        )
        under = [" " * width] * len(row)
        for at in (position for where, position in arrows if where == rank):
            under[at] = "^" * width
        if "^" in "".join(under):
            lines.append((" " * len(head) + " ".join(under[first:last])).rstrip())
    return "\n".join(lines)


WIDE = 40
"""The longest rows to show whole; longer ones are shown around the arrows."""


def _window(columns: int, positions: list[int]) -> tuple[int, int]:
    if columns <= WIDE or not positions:
        return 0, columns
    return max(0, min(positions) - WIDE // 4), min(columns, max(positions) + WIDE // 4)


def _label(action: Action, plain: bool) -> str:
    return f"{action.kind}{action.microbatch}" if plain else str(action)


def _rank(schedule: Schedule, rank: int) -> str:
    return f"rank {str(rank).rjust(len(str(schedule.ranks - 1)))}"

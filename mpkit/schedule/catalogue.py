"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable

from mpkit.schedule.all_forward import gpipe, looped_bfs, naive
from mpkit.schedule.core import Schedule
from mpkit.schedule.one_f_one_b import interleaved_1f1b, one_f_one_b
from mpkit.schedule.v_shaped import dualpipev, zbv
from mpkit.schedule.zero_bubble import interleaved_zb, zb_h1, zb_h2

__all__ = ["LOOPED", "NAMES", "V_SHAPED", "named"]

PLAIN: dict[str, Callable[[int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
}
"""Schedules with one stage per rank, functions of p ranks and m micro-batches."""

LOOPED: dict[str, Callable[[int, int, int], Schedule]] = {
    "looped_bfs": looped_bfs,
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_zb": interleaved_zb,
}
"""Schedules with any number v of stages per rank, functions of p, m and v."""

V_SHAPED: dict[str, Callable[[int, int], Schedule]] = {"zbv": zbv, "dualpipev": dualpipev}
"""Schedules with two stages per rank."""

NAMES = (
    "naive", "gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "interleaved_zb", "dualpipev",
)  # fmt: skip
"""The names for `Plan(schedule=...)`."""


def named(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Build the schedule with this name, for p ranks with v stages each and m micro-batches.

    >>> print(named("1f1b", 2, 3))
    rank 0 | F0 F1  .  . B0 -- F2 B1 --  . B2 --
    rank 1 |  . F0 B0 -- F1 B1 -- F2 B2 --  .  .
    """
    if name in LOOPED:
        return LOOPED[name](p, m, v)
    return (PLAIN | V_SHAPED)[name](p, m)

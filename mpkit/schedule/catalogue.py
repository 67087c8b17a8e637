"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpkit.schedule.all_forward import gpipe, looped_bfs, naive
from mpkit.schedule.core import Schedule
from mpkit.schedule.one_f_one_b import interleaved_1f1b, one_f_one_b
from mpkit.schedule.v_shaped import dualpipev, zbv
from mpkit.schedule.zero_bubble import interleaved_zb, zb_h1, zb_h2

if TYPE_CHECKING:
    from mpkit.plan import Plan

__all__ = ["LOOPED", "NAMES", "V_SHAPED", "build", "named"]

PLAIN: dict[str, Callable[[int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
}
"""Those with one stage a rank, functions of p ranks and m micro-batches."""

LOOPED: dict[str, Callable[[int, int, int], Schedule]] = {
    "looped_bfs": looped_bfs,
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_zb": interleaved_zb,
}
"""Those with any number v of stages a rank, functions of p, m and v."""

V_SHAPED: dict[str, Callable[[int, int], Schedule]] = {"zbv": zbv, "dualpipev": dualpipev}
"""Those with two stages a rank."""

NAMES = (
    "naive", "gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "interleaved_zb", "dualpipev",
)  # fmt: skip
"""What `Plan(schedule=...)` may name."""


def named(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """The schedule of a name, for p ranks with v stages each and m micro-batches.

    >>> print(named("1f1b", 2, 3))
    rank 0 | F0 F1  .  . B0 -- F2 B1 --  . B2 --
    rank 1 |  . F0 B0 -- F1 B1 -- F2 B2 --  .  .
    """
    if name in LOOPED:
        return LOOPED[name](p, m, v)
    return (PLAIN | V_SHAPED)[name](p, m)


def build(plan: Plan) -> Schedule:
    """The schedule of a plan: the named one for its stages and micro-batches, or the plan's own.

    A model in one stage accumulates gradients: each micro-batch goes forward and back before the next, whatever
    schedule is named, since holding the activations of all of them would gain nothing.

    >>> import mpkit as mk
    >>> print(build(mk.Plan(microbatches=3)))
    rank 0 | F0 B0 -- F1 B1 -- F2 B2 --
    """
    if isinstance(plan.schedule, Schedule):
        return plan.schedule
    if plan.stages == 1:
        return naive(1, plan.microbatches)
    return named(plan.schedule, plan.pp, plan.microbatches, plan.virtual_stages)

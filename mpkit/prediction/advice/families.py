"""Families: plans with the same parts, so that an advice says what each further part gains.

parts      ZeRO, recomputation, tensor, context and pipeline parallelism, groups of ZeRO, offload
best       of each set of parts, the fastest plan that fits
ladder     those that are faster than every family with fewer parts, the simplest first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpkit.common.units import percent, seconds
from mpkit.plan.plan import Plan
from mpkit.prediction.advice.prices import LayoutPrices
from mpkit.prediction.advice.search import FoundLayout
from mpkit.prediction.cost_model.layout import Layout

__all__ = ["RUNNING", "SIMPLER", "Family", "families_of"]

SIMPLER = 0.05
"""How much longer a step of the simplest plan may take than one of the best."""

RUNNING = ("megatron", "torchtitan", "fsdp", "accelerate", "deepspeed")
"""The frameworks that an advice asks whether they can run its best plan."""

PARTS: dict[str, Callable[[Layout], bool]] = {
    "ZeRO": lambda layout: layout.zero > 0 and layout.replicas > 1,
    "recomputation": lambda layout: layout.recompute != "none",
    "tensor parallelism": lambda layout: layout.tp > 1,
    "a pipeline": lambda layout: layout.pp > 1,
    "context parallelism": lambda layout: layout.cp > 1,
    "expert parallelism": lambda layout: layout.ep > 1,
    "groups of ZeRO": lambda layout: layout.sharded > 0,
    "offload": lambda layout: layout.offload != "none",
}


@dataclass(frozen=True)
class Family:
    """The best plan of those with the same parts.

    Attributes:
        parts: what it has beside data parallelism.
        plan: the plan.
        seconds: per step.
        longer: how much longer that takes than a step of the best of all, as a share of it.
        memory: bytes of the fullest rank, fragmentation included.
    """

    parts: tuple[str, ...]
    plan: Plan
    seconds: float
    longer: float
    memory: float

    @property
    def words(self) -> str:
        """Its parts in words."""
        first, last = ", ".join(self.parts[:-1]), self.parts[-1:]
        return f"with {' and '.join(filter(None, (first, *last))) or 'data parallelism alone'}"

    def __str__(self) -> str:
        return f"{self.words}: {seconds(self.seconds)}, {percent(self.longer)} longer, {self.plan!r}"


def families_of(priced: LayoutPrices, found: Sequence[FoundLayout]) -> list[Family]:
    """Return the ladder of families, of layouts that are ordered with the best first."""
    best: dict[tuple[str, ...], FoundLayout] = {}
    for each in found:
        best.setdefault(tuple(part for part, has in PARTS.items() if has(each.layout)), each)
    ladder: list[Family] = []
    for parts, each in sorted(best.items(), key=lambda item: (len(item[0]), item[1].seconds)):
        if not ladder or each.seconds < min(family.seconds for family in ladder):
            longer = each.seconds / found[0].seconds - 1
            ladder.append(Family(parts, priced.plan_of(each.layout), each.seconds, longer, each.memory))
    return ladder

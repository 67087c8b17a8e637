"""Objective: what is best of the plans that fit.

time       the fastest step on all devices of the machine
cost       the cheapest step, GPU-hours x price, on as many devices as that takes
devices    the fewest devices, and of the plans for these the fastest step
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from mpkit.common.units import percent, seconds
from mpkit.plan.kinds import real
from mpkit.prediction.advice.prices import LayoutPrices
from mpkit.prediction.advice.search import (
    FEW,
    PLAYED,
    FoundLayout,
    FoundLayouts,
    SearchResult,
    search,
    sort_played,
)
from mpkit.prediction.advice.space import divisors

__all__ = ["TIME", "Objective", "objective_of"]

WORDS = "time", "cost", "devices"


@dataclass(frozen=True)
class Objective:
    """What is best.

    Attributes:
        by: "time", "cost" or "devices".
        price: of an hour of a GPU; 1 where only GPU-hours count.
    """

    by: str = "time"
    price: float = 1.0

    def value_of(self, took: float, devices: int) -> tuple[float, float]:
        """Return what is to be least, of a step that takes so long on so many devices; and the seconds.

        >>> Objective("cost", 2.0).value_of(1800.0, 8)  # half an hour of eight
        (8.0, 1800.0)
        """
        if self.by == "cost":
            return took * devices * self.price / 3600, took
        return (float(devices), took) if self.by == "devices" else (took, took)

    def search(self, priced: LayoutPrices) -> SearchResult:
        """Return the layouts that fit, the best first."""
        machine = priced.hardware
        found: list[FoundLayouts] = []
        tight: list[FoundLayouts] = []
        considered = 0
        for devices in [machine.devices] if self.by == "time" else sizes(machine.nodes, machine.per_node):
            roomy, full, tried = search(priced, devices)
            found.append(roomy)
            tight.append(full)
            considered += tried
            if len(roomy) and self.by == "devices":
                break
        best = sort_played(priced, found, self.value_of, PLAYED)
        full_ones = sort_played(priced, tight, self.value_of, FEW if best else PLAYED)
        return SearchResult(best, full_ones, considered)

    def words(self, best: FoundLayout, devices: int) -> str:
        """Say what the best plan comes to, of a machine with so many devices."""
        used = best.layout.ranks
        if self.by == "devices":
            return f"{used} of {devices} devices are the fewest that it fits."
        hours = best.seconds * used / 3600
        return f"{hours * self.price:.4g} per step on {used} of {devices} devices: {seconds(best.seconds)} x {used}."

    def explain_rejection(self, took: float, devices: int, best: FoundLayout) -> str:
        """Say what stands against a plan that fits, beside the best one; by cost or devices."""
        if self.by == "devices" and devices > best.layout.ranks:
            return f"it uses {devices} devices, where {best.layout.ranks} are enough"
        cost, least = self.value_of(took, devices)[0], self.value_of(best.seconds, best.layout.ranks)[0]
        if self.by == "cost":
            return f"a step costs {cost:.4g}, {percent(cost / least - 1)} more"
        return f"a step takes {percent(took / best.seconds - 1)} longer on as many devices"


TIME = Objective()


def objective_of(by: str, price: float | None) -> Objective:
    """Return the objective by its word.

    Raises:
        ValueError: there is no such word, or the price is none.
    """
    if by not in WORDS:
        raise ValueError(f"advise(by={by!r}): what is best is one of {', '.join(map(repr, WORDS))}")
    if price is not None and by != "cost":
        raise ValueError(f"advise(by={by!r}, price={price!r}): a price counts for by='cost' alone")
    if price is not None and not 0 < (real(price) or 0) < inf:
        raise ValueError(f"advise(price={price!r}): the price of an hour of a GPU, such as price=2.5")
    return Objective(by, 1.0 if price is None else float(price))


def sizes(nodes: int, per_node: int) -> list[int]:
    """Return how many devices of a machine can be used: parts of a node, then whole nodes that divide all of them.

    >>> sizes(4, 8)
    [1, 2, 4, 8, 16, 32]
    """
    return divisors(per_node) + [per_node * n for n in divisors(nodes)[1:]]

"""Search: the layouts that fit, each with its time, memory first; and what is best of them.

For all layouts at once, as one `Layout` of arrays:

    relief     offload and recomputation, in the order of what they cost: the cheapest that fits is the best of them;
               what does not fit with the most recomputation never does
    room       plans that leave a part of the memory free; those that fill it are kept apart
    time       priced for what fits only; a formula stands for the pipeline, and the best layouts are then played

What is left out is never better than what is kept, so the best layout found is the best there is;
tests/advice/test_advice.py compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from mpkit.common.units import percent, seconds
from mpkit.plan.kinds import every, real
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import SCHEDULES
from mpkit.prediction.advice.space import divisors, families, offers_of
from mpkit.prediction.cost_model.layout import Layout, plan_of
from mpkit.prediction.cost_model.memory import most_at_peak
from mpkit.prediction.cost_model.workload import Workload

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]

PLAYED = 25
"""The layouts that are played, for the order of those that are shown."""
FEW = 5
"""The layouts that are played of those that fill the memory."""
CHUNK = 1 << 14
"""The layouts that are priced at once: their arrays fit a cache."""
LONGEST = 4096
"""The most actions of a schedule that are played for them; `mk.estimate` plays more."""
HEADROOM = 0.92
"""The share of a device's memory that a plan may take: predictions of memory are within 5 %, and batches differ."""


class FoundLayout(NamedTuple):
    """A layout that fits.

    Attributes:
        layout: how the step is divided.
        seconds: per step.
        memory: bytes at the peak of the rank with most, fragmentation included.
    """

    layout: Layout
    seconds: float
    memory: float


@dataclass(eq=False)
class FoundLayouts(Sequence[FoundLayout]):
    """Layouts that fit, by the hundred thousand: each is made when it is looked at.

    Attributes:
        layouts: many as one.
        family: of each, the number of those that differ in the samples of a micro-batch only.
        seconds, memory: of each.
    """

    layouts: Layout
    family: Indices
    seconds: Floats
    memory: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    @overload
    def __getitem__(self, place: int) -> FoundLayout: ...
    @overload
    def __getitem__(self, place: slice) -> list[FoundLayout]: ...
    def __getitem__(self, place: int | slice) -> FoundLayout | list[FoundLayout]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        return FoundLayout(self.layouts.one(place), float(self.seconds[place]), float(self.memory[place]))

    @cached_property
    def kinds(self) -> list[FoundLayout]:
        """The first of each family, in order."""
        return [self[place] for place in np.sort(np.unique(self.family, return_index=True)[1])]

    def take(self, rows: Any) -> FoundLayouts:
        """Return some of the rows, in this order."""
        return FoundLayouts(self.layouts.take(rows), self.family[rows], self.seconds[rows], self.memory[rows])


NOTHING = FoundLayouts(Layout(), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


def search(asked: Workload, sizes: Sequence[int]) -> tuple[FoundLayouts, FoundLayouts, int]:
    """Return the layouts that fit, those that fill the memory, and the number that were considered.

    For each offload the least recomputation that fits is kept, and the least that leaves a part of the memory free.
    Where no recomputation is needed, more offload is for nothing.

    Args:
        asked: what is to be trained.
        sizes: the numbers of devices.
    """
    offers, stack, whole = offers_of(asked.stack.name), asked.stack, asked.available
    found = [family for devices in sizes for family in families(asked, devices)]
    if not found:
        return NOTHING, NOTHING, 0
    bases, choices = zip(*found, strict=True)
    family = np.repeat(np.arange(len(bases)), [len(each) for each in choices])
    microbatch = np.concatenate([np.array(each, np.int64) for each in choices])
    layouts = Layout.stack(bases).take(family, microbatch=microbatch)
    layouts = layouts.vary(microbatches=asked.global_batch // layouts.dp // microbatch)
    memory = asked.memory_model.ranks(layouts)

    # Parameters can be on the host under ZeRO-3 only. Selective recomputation frees the attention's scores, which fused
    # attention does not keep.
    in_pairs = [name for name, entry in SCHEDULES.items() if entry.pairs]
    every_row = np.ones(len(family), bool)
    sharded = every_row & (layouts.zero == 3)
    joint = every_row & np.isin(np.asarray(layouts.schedule), in_pairs)
    recomputes = [
        each
        for each in offers.recompute
        if not (stack.fused and each == "selective") and every(each) <= asked.model.layers
    ]
    considered, reliefs, parts = 0, list(product(offers.offload, recomputes)), []
    open_rows = every_row.copy()  # those for which no relief was enough yet
    for offload in offers.offload:
        able = sharded if offload == "params" else every_row
        rows = np.flatnonzero(able & open_rows)
        needs = [rank.with_offload(offload).take(rows) for rank in memory]
        possible = most_at_peak(needs, recomputes[-1]) <= whole
        rows, needs = rows[possible], [rank.take(possible) for rank in needs]
        filled = np.zeros(len(rows), bool)
        for recompute in recomputes:
            usable = ~joint | (recompute in offers.joint_recompute)
            considered += int((able & usable).sum())
            held = np.where(usable[rows], most_at_peak(needs, recompute), inf)
            fits = held <= HEADROOM * whole
            kept = fits | ((held <= whole) & ~filled)
            number = reliefs.index((offload, recompute))
            parts.append((rows[kept], np.full(kept.sum(), number), held[kept]))
            if recompute == recomputes[0]:
                open_rows[rows[fits]] = False
            rows, filled, needs = rows[~fits], (filled | kept)[~fits], [rank.take(~fits) for rank in needs]
    rows, relief, held = (np.concatenate(each) for each in zip(*parts, strict=True))
    offloads, recomputed = (np.array(each)[relief] for each in zip(*reliefs, strict=True))
    some = layouts.take(rows, offload=offloads, recompute=recomputed)
    chunks = [slice(start, start + CHUNK) for start in range(0, len(rows), CHUNK)]
    took = np.concatenate([np.zeros(0), *(asked.time_model.seconds(some.take(chunk)) for chunk in chunks)])
    priced = FoundLayouts(some, family[rows] * len(reliefs) + relief, took, held)
    roomy = held <= HEADROOM * whole
    return priced.take(roomy), priced.take(~roomy), considered


# ---- what is best

WORDS = "time", "cost", "devices"


@dataclass(frozen=True)
class Objective:
    """What is best of the plans that fit.

    Attributes:
        by: "time": the fastest step on all devices of the machine. "cost": the cheapest step, GPU-hours x price, on as
            many devices as that takes. "devices": the fewest devices, and of the plans for these the fastest step.
        price: of an hour of a GPU, for "cost"; None: only GPU-hours count.

    Raises:
        ValueError: there is no such word, or the price is none.
    """

    by: str = "time"
    price: float | None = None

    def __post_init__(self) -> None:
        if self.by not in WORDS:
            raise ValueError(f"advise(by={self.by!r}): what is best is one of {', '.join(map(repr, WORDS))}")
        if self.price is not None and self.by != "cost":
            raise ValueError(
                f"advise(by={self.by!r}, price={self.price!r}): a price counts for by='cost' alone"
            )
        if self.price is not None and not 0 < (real(self.price) or 0) < inf:
            raise ValueError(
                f"advise(price={self.price!r}): the price of an hour of a GPU, such as price=2.5"
            )

    def value_of(self, took: Any, devices: Any) -> tuple[Any, Any]:
        """Return what is to be least, of a step that takes so long on so many devices; and the seconds.

        >>> Objective("cost", 2.0).value_of(1800.0, 8)  # half an hour of eight
        (8.0, 1800.0)
        """
        if self.by == "cost":
            return took * devices * (self.price or 1.0) / 3600, took
        return (1.0 * devices, took) if self.by == "devices" else (took, took)

    def words(self, best: FoundLayout, devices: int) -> str:
        """Say what the best plan comes to, of a machine with so many devices."""
        used = best.layout.ranks
        if self.by == "devices":
            return f"{used} of {devices} devices are the fewest that it fits."
        cost, took = self.value_of(best.seconds, used)
        return f"{cost:.4g} per step on {used} of {devices} devices: {seconds(took)} x {used}."

    def explain_rejection(self, took: float, devices: int, best: FoundLayout) -> str:
        """Say what stands against a plan that fits, beside the best one; by cost or devices."""
        if self.by == "devices" and devices > best.layout.ranks:
            return f"it uses {devices} devices, where {best.layout.ranks} are enough"
        cost, least = self.value_of(took, devices)[0], self.value_of(best.seconds, best.layout.ranks)[0]
        if self.by == "cost":
            return f"a step costs {cost:.4g}, {percent(cost / least - 1)} more"
        return f"a step takes {percent(took / best.seconds - 1)} longer on as many devices"


TIME = Objective()


def handicap_of(asked: Workload, offload: Any) -> Any:
    """Return the factor of a layout's time in comparisons: offload has to gain more than predictions are off."""
    return 1 + asked.preset.band * (np.asarray(offload) != "none")


def rank(
    asked: Workload, found: FoundLayouts, objective: Objective = TIME, played: int = PLAYED
) -> FoundLayouts:
    """Return layouts found, the best first; the pipelines of the best ones are played."""

    def order(of: FoundLayouts) -> Indices:
        keys = objective.value_of(of.seconds * handicap_of(asked, of.layouts.offload), of.layouts.ranks)
        return np.lexsort([np.broadcast_to(key, len(of)) for key in reversed(keys)])

    some = found.take(order(found))
    best = some.take(np.arange(min(played, len(some))))
    best.seconds[:] = [asked.time_model.step(each.layout, LONGEST).seconds for each in best]
    first = order(best)
    some.seconds[: len(best)] = best.seconds
    return some.take(np.concatenate([first, np.arange(len(best), len(some))]))


def find_best(asked: Workload, objective: Objective = TIME) -> tuple[FoundLayouts, FoundLayouts, int]:
    """Return the layouts that fit, those that fill the memory, the best first, and the number that were considered."""
    roomy = full = NOTHING
    tried = 0
    for some in _numbers_of_devices(asked, objective):
        roomy, full, considered = search(asked, some)
        tried += considered
        if len(roomy):
            break
    best = rank(asked, roomy, objective)
    return best, rank(asked, full, objective, FEW if len(best) else PLAYED), tried


def _numbers_of_devices(asked: Workload, objective: Objective) -> Iterator[Sequence[int]]:
    """Yield the numbers of devices that are searched together: parts of a node, or nodes that divide all of them."""
    machine = asked.hardware
    sizes = divisors(machine.per_node) + [machine.per_node * n for n in divisors(machine.nodes)[1:]]
    if objective.by == "devices":
        yield from ([each] for each in sizes)
    else:
        yield sizes if objective.by == "cost" else [machine.devices]


def plan_under(asked: Workload, layout: Layout) -> Plan:
    """Return the plan of a layout, in the 16 bits that the device has, or in the 32 bits of the software."""
    precision = "full" if asked.stack.element == 4 else asked.hardware.device.half
    return replace(plan_of(layout), precision=precision)

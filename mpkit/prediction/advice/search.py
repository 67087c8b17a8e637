"""Search: the layouts that fit, each with its time, memory first; and what is best of them.

For all layouts at once, as one `Layout` of arrays:

    memory     with the most relief: what does not fit then never does
    relief     offload and recomputation, in the order of what they cost: the cheapest that fits is the best of them
    room       plans that leave a part of the memory free; those that fill it are kept apart
    time       priced for what fits only; a formula stands for the pipeline, and the best layouts are then played

What is left out is never better than what is kept, so the best layout found is the best there is;
tests/advice/test_advice.py compares the two.

Objective: what is best of the plans that fit.

time       the fastest step on all devices of the machine
cost       the cheapest step, GPU-hours x price, on as many devices as that takes
devices    the fewest devices, and of the plans for these the fastest step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product
from math import inf
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from mpkit.common.units import percent, seconds
from mpkit.devices.hardware import Hardware
from mpkit.plan.kinds import every, real
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import has_pairs
from mpkit.prediction.advice.space import Offers, TrainingQuestion, divisors, families, offers_of
from mpkit.prediction.cost_model.layout import Layout, Stages, plan_of, stages_of
from mpkit.prediction.cost_model.memory import LayoutMemory, MemoryModel
from mpkit.prediction.cost_model.preset import Preset
from mpkit.prediction.cost_model.stack import Stack
from mpkit.prediction.cost_model.step import Pipelines, StepModel, StepTime

__all__ = [
    "FEW", "PLAYED", "SHOWN", "TIME", "FoundLayout", "FoundLayouts", "LayoutPrices", "Objective", "SearchResult",
    "figures_of", "kinds_of", "objective_of", "search", "sort_played",
]  # fmt: skip

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]

SHOWN = 20
"""The plans of an advice."""
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

Relief = tuple[str, str]
"""An offload and a recomputation."""


@dataclass(frozen=True)
class LayoutPrices:
    """What layouts are priced for.

    Attributes:
        asked, hardware, stack, preset: as for `mk.estimate`.
    """

    asked: TrainingQuestion
    hardware: Hardware
    stack: Stack
    preset: Preset

    @property
    def head(self) -> float:
        """As how many layers the head counts where the software cuts stages by weight; 0: it does not."""
        return self.asked.model.head_in_layers if self.stack.by_weight else 0.0

    @property
    def whole(self) -> float:
        """The bytes of a device's memory; infinite where they are not known, as of a CPU."""
        return float(self.hardware.device.memory or inf)

    @property
    def room(self) -> float:
        """The bytes that a plan may take on a device."""
        return HEADROOM * self.whole

    @cached_property
    def memory(self) -> MemoryModel:
        """The memory of layouts."""
        return MemoryModel(self.asked.model, self.asked.sequence, self.stack, self.hardware.device)

    @cached_property
    def time(self) -> StepModel:
        """The time of layouts."""
        asked = self.asked
        return StepModel(asked.model, asked.sequence, self.hardware, self.stack, self.preset.constants)

    def step(self, layout: Layout) -> StepTime:
        """Return the time of a step whose pipeline is played."""
        return self.time.step(layout, LONGEST)

    def plan_of(self, layout: Layout) -> Plan:
        """Return the plan of a layout, in the 16 bits that the device has, or in the 32 bits of the software."""
        precision = "full" if self.stack.element == 4 else self.hardware.device.half
        return replace(plan_of(layout), precision=precision)

    def handicap(self, layout: Layout) -> float:
        """Return the factor of a layout's time in comparisons: offload has to gain more than predictions are off."""
        return 1.0 if layout.offload == "none" else 1 + self.preset.band


# ---- what is found


@dataclass(frozen=True, slots=True)
class FoundLayout:
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
        layouts: many as one, without relief.
        family: by layout, the number of its family.
        rows: of the layouts, in order.
        reliefs: the pairs of offload and recomputation; `relief` has the number of each row's.
        seconds, memory: of each row.
    """

    layouts: Layout
    family: Indices
    rows: Indices
    reliefs: Sequence[Relief]
    relief: Indices
    seconds: Floats
    memory: Floats

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> FoundLayout: ...
    @overload
    def __getitem__(self, place: slice) -> list[FoundLayout]: ...
    def __getitem__(self, place: int | slice) -> FoundLayout | list[FoundLayout]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        offload, recompute = self.reliefs[self.relief[place]]
        layout = self.layouts.one(self.rows[place], offload=offload, recompute=recompute)
        return FoundLayout(layout, float(self.seconds[place]), float(self.memory[place]))

    def __iter__(self) -> Iterator[FoundLayout]:
        return map(self.__getitem__, range(len(self)))

    @property
    def on_host(self) -> NDArray[np.bool_]:
        """Whether each row keeps something on the host."""
        return np.array([offload != "none" for offload, _ in self.reliefs], bool)[self.relief]

    @cached_property
    def kinds(self) -> list[FoundLayout]:
        """The first of those that differ in the samples of a micro-batch only, in order."""
        code = self.family[self.rows] * len(self.reliefs) + self.relief
        return [self[place] for place in np.sort(np.unique(code, return_index=True)[1])]

    def take(self, order: Indices) -> FoundLayouts:
        """Return some of the rows, in this order."""
        return replace(
            self, rows=self.rows[order], relief=self.relief[order], seconds=self.seconds[order],
            memory=self.memory[order],
        )  # fmt: skip


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        found: the layouts that fit, the best first.
        tight: those that fit and leave less than 8 % of the memory free, the best first.
        considered: the number that were considered, those that do not fit included.
    """

    found: Sequence[FoundLayout]
    tight: Sequence[FoundLayout]
    considered: int


# ---- the search


@dataclass(frozen=True)
class _Candidates:
    """All layouts on so many devices, with what their prices have in common.

    Attributes:
        priced: what they are priced for.
        layouts, family: as of FoundLayouts.
        stages, pipelines, memory: of the layouts.
    """

    priced: LayoutPrices
    layouts: Layout
    family: Indices
    stages: Stages
    pipelines: Pipelines
    memory: LayoutMemory

    def with_times(
        self, parts: Sequence[tuple[Indices, Relief, Floats]], reliefs: Sequence[Relief]
    ) -> FoundLayouts:
        """Return rows with their relief and memory as layouts found, with their times."""
        rows = np.concatenate([part[0] for part in parts] or [np.zeros(0, np.int64)])
        relief = np.repeat(
            [reliefs.index(part[1]) for part in parts], [len(part[0]) for part in parts]
        ).astype(int)
        memory = np.concatenate([part[2] for part in parts] or [np.zeros(0)])
        offload, recompute = np.array(reliefs)[relief].T
        took = np.zeros(len(rows))
        for start in range(0, len(rows), CHUNK):
            some = slice(start, start + CHUNK)
            which = rows[some]
            layouts = self.layouts.take(which, offload=offload[some], recompute=recompute[some])
            took[some] = self.priced.time.seconds(
                layouts, self.stages.take(which), self.pipelines.take(which)
            )
        return FoundLayouts(self.layouts, self.family, rows, reliefs, relief, took, memory)


def search(priced: LayoutPrices, devices: int) -> tuple[FoundLayouts, FoundLayouts, int]:
    """Return the layouts that fit so many devices, those that fill them, and the number that were considered."""
    stack, offers = priced.stack, offers_of(priced.stack.name)
    every_family = list(families(priced.asked, devices, priced.hardware.per_node, offers, priced.head))
    reliefs = _reliefs(offers, stack, priced.asked.model.layers)
    if not every_family:
        none = np.zeros(0, np.int64)
        nothing = FoundLayouts(Layout(), none, none, reliefs, none, np.zeros(0), np.zeros(0))
        return nothing, nothing, 0
    bases = [each.base for each in every_family]
    family = np.repeat(np.arange(len(bases)), [len(each.sizes) for each in every_family])
    samples = np.array([each.samples for each in every_family])[family]
    microbatch = np.concatenate([np.array(each.sizes, np.int64) for each in every_family])
    layouts = Layout.stack(bases).take(family, microbatch=microbatch, microbatches=samples // microbatch)
    stages = stages_of(priced.asked.model, layouts)
    candidates = _Candidates(
        priced, layouts, family, stages, priced.time.pipelines(layouts), priced.memory.of(layouts, stages)
    )
    sharded = np.array([base.zero == 3 for base in bases])[family]
    joint = np.array([has_pairs(base.schedule) for base in bases])[family]
    considered = 0
    kept: Kept = ([], [])
    for is_sharded, is_joint in product((True, False), repeat=2):
        rows = np.flatnonzero((sharded == is_sharded) & (joint == is_joint))
        group = [each for each in reliefs if is_sharded or each[0] != "params"]
        group = [each for each in group if not is_joint or each[1] in offers.joint_recompute]
        considered += len(rows) * len(group)
        if len(rows) and group:
            offload, recompute = group[-1]
            least = candidates.memory.with_offload(offload).take(rows).peak(recompute)
            rows = rows[least <= priced.whole]
            _fit(candidates, rows, group, kept)
    found, tight = (candidates.with_times(some, reliefs) for some in kept)
    return found, tight, considered


def _reliefs(offers: Offers, stack: Stack, layers: int) -> list[Relief]:
    """Return the pairs of offload and recomputation that a layout can have, ordered by offload, then by cost.

    Selective recomputation frees the attention's scores, which fused attention does not keep; parameters can be on the
    host under ZeRO-3 only, and come last.
    """
    recomputes = [
        each
        for each in offers.recompute
        if not (stack.fused and each == "selective") and every(each) <= layers
    ]
    return [(offload, recompute) for offload in offers.offload for recompute in recomputes]


Kept = tuple[list[tuple[Indices, Relief, Floats]], list[tuple[Indices, Relief, Floats]]]
"""Rows with their relief and memory: of those that leave room, and of those that fill it."""


def _fit(candidates: _Candidates, rows: Indices, reliefs: Sequence[Relief], kept: Kept) -> None:
    """Find for each offload the least recomputation that fits, and the least that leaves a part of the memory free.

    Where no recomputation is needed, more offload is for nothing.
    """
    room, whole = candidates.priced.room, candidates.priced.whole
    for offload, group in groupby(reliefs, key=lambda relief: relief[0]):
        left, filled, enough = rows, np.zeros(len(rows), bool), rows[:0]
        needs = candidates.memory.with_offload(offload).take(rows)
        for relief in group:
            memory = needs.peak(relief[1])
            roomy, tight = memory <= room, (memory > room) & (memory <= whole) & ~filled
            kept[0].append((left[roomy], relief, memory[roomy]))
            kept[1].append((left[tight], relief, memory[tight]))
            if relief[1] == reliefs[0][1]:
                enough = left[roomy]
            left, filled, needs = left[~roomy], (filled | tight)[~roomy], needs.take(~roomy)
        rows = np.setdiff1d(rows, enough, assume_unique=True)


def kinds_of(found: Sequence[FoundLayout]) -> Sequence[FoundLayout]:
    """Return layouts found without those that differ from an earlier one in the samples of a micro-batch only."""
    return found.kinds if isinstance(found, FoundLayouts) else found


def figures_of(found: Sequence[FoundLayout]) -> tuple[Floats, Floats]:
    """Return the seconds and the memory of layouts found, in order."""
    if isinstance(found, FoundLayouts):
        return found.seconds, found.memory
    return np.array([each.seconds for each in found]), np.array([each.memory for each in found])


def sort_played(
    priced: LayoutPrices,
    parts: Sequence[FoundLayouts],
    value: Callable[[Any, int], tuple[Any, Any]],
    played: int,
) -> Sequence[FoundLayout]:
    """Return the layouts found, the best first, with the pipelines of the best ones played.

    Args:
        priced: what was asked.
        parts: the layouts, as `search` returns them, for one number of devices each.
        value: of seconds, or an array of them, on so many devices: what is to be least, and then the next.
        played: how many are played.
    """

    def order(part: FoundLayouts) -> Indices:
        handicap = np.where(part.on_host, 1 + priced.preset.band, 1.0)
        keys = value(part.seconds * handicap, part[0].layout.ranks)
        return np.lexsort([np.broadcast_to(key, len(part)) for key in reversed(keys)])

    sorted_parts = []
    for part in (part for part in parts if len(part)):
        some = part.take(order(part))
        best = some.take(np.arange(min(played, len(some))))
        best.seconds[:] = [priced.step(each.layout).seconds for each in best]
        first = order(best)
        some.seconds[: len(best)] = best.seconds
        sorted_parts.append(some.take(np.concatenate([first, np.arange(len(best), len(some))])))
    if len(sorted_parts) == 1:
        return sorted_parts[0]

    def least(each: FoundLayout) -> tuple[Any, Any]:
        return value(each.seconds * priced.handicap(each.layout), each.layout.ranks)

    return sorted((each for part in sorted_parts for each in part), key=least)


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

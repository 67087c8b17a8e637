"""Search: the layouts that fit, each with its time, memory first.

For a family of layouts, which differ in the samples of a micro-batch only:

    relief     offload and recomputation, in the order of what they cost: the cheapest that fits is the best of them
    room       plans that leave a part of the memory free; those that fill it are kept apart
    prune      activations and logits grow with the micro-batch, so when not even the most relief makes one fit, none of
               the larger ones fits
    time       priced for what fits only; a formula stands for the pipeline, and the best layouts are then played

What is left out is never better than what is kept, so the best layout found is the best there is;
tests/advice/test_search.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from typing import Any

from mpkit.devices.hardware import Hardware
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.plan.tensor_checks import METHODS, ORDERS
from mpkit.prediction.advice.offers import Offers, offers_of
from mpkit.prediction.advice.space import TrainingQuestion, families
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.fits import FRAGMENTATION
from mpkit.prediction.cost_model.layout import Layout, plan_of
from mpkit.prediction.cost_model.memory import fullest_stages, stage_memory
from mpkit.prediction.cost_model.preset import Preset
from mpkit.prediction.cost_model.shares import ParameterShares
from mpkit.prediction.cost_model.stack import Constants, Stack
from mpkit.prediction.cost_model.step import StepTime, screened_time, step_time

__all__ = ["FEW", "PLAYED", "SHOWN", "FoundLayout", "LayoutPrices", "Searched", "best_played", "search"]

HEADROOM = 0.92
"""The share of a device's memory that a plan may take: predictions of memory are within 5 %, and batches differ."""
SHOWN = 20
"""The plans of an advice."""
PLAYED = 25
"""The layouts that are played, for the order of those that are shown."""
FEW = 5
"""The layouts that are played of those that fill the memory."""
LONGEST = 4096
"""The most actions of a schedule that are played for them; `mk.estimate` plays more."""


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


@dataclass(frozen=True)
class Searched:
    """What a search found.

    Attributes:
        found: the layouts that fit, the best first.
        tight: those that fit and leave less than 8 % of the memory free, the best first.
        considered: the number that were considered, those that do not fit included.
    """

    found: list[FoundLayout]
    tight: list[FoundLayout]
    considered: int


@dataclass(frozen=True)
class LayoutPrices:
    """Prices layouts: memory and time.

    Attributes:
        asked, hardware, stack, preset: as for `mk.estimate`.
    """

    asked: TrainingQuestion
    hardware: Hardware
    stack: Stack
    preset: Preset

    @cached_property
    def head(self) -> float:
        """As how many layers the head counts where the software cuts stages by weight; 0: it does not."""
        return self.asked.model.head_in_layers if self.stack.by_weight else 0.0

    @property
    def room(self) -> float:
        """The bytes that a plan may take on a device."""
        return HEADROOM * self.hardware.device.memory

    def plan_of(self, layout: Layout) -> Plan:
        """Return the plan of a layout, in 16 bits that the device has and with the order of tokens of the software."""
        ring = layout.cp > 1 and layout.cp_method != METHODS[1]
        order = offers_of(self.stack.name).cp_order if ring else ORDERS[0]
        return replace(plan_of(layout), precision=self.hardware.device.half, cp_order=order)

    def handicap(self, layout: Layout) -> float:
        """Return the factor of a layout's time in comparisons: offload has to gain more than predictions are off."""
        return 1.0 if layout.offload == "none" else 1 + self.preset.band

    def memory(self, layout: Layout) -> float:
        """Return the bytes at the peak of the rank with most, with what fragmentation takes."""
        asked = self.asked
        shares = self._shares(layout)
        stages = stage_memory(
            asked.model, layout, asked.sequence, self.stack, shares, fullest_stages(asked.model, layout),
            self.hardware.device,
        )  # fmt: skip
        return max(sum(stage.values()) for stage in stages) * (1 + FRAGMENTATION)

    @cached_property
    def _shares(self) -> Callable[[Layout], ParameterShares]:
        """Return the parameters of the ranks, which few of the degrees decide."""

        @cache
        def shares(
            pp: int,
            tp: int,
            zero: int,
            replicas: int,
            sharded: int,
            schedule: str | Schedule,
            ep: int,
            etp: int,
        ) -> ParameterShares:
            layout = Layout(
                pp=pp, tp=tp, zero=zero, dp=replicas, sharded=sharded, head=self.head, schedule=schedule, ep=ep,
                etp=etp,
            )  # fmt: skip
            return ParameterShares(self.asked.model, layout, self.stack)

        return lambda layout: shares(
            layout.pp,
            layout.tp,
            layout.zero,
            layout.replicas,
            layout.sharded,
            layout.schedule,
            layout.ep,
            layout.etp,
        )

    def step(self, layout: Layout) -> StepTime:
        """Return the time of a step."""
        return step_time(*self._step_arguments(layout), LONGEST)

    def screened_seconds(self, layout: Layout) -> float:
        """Return about the seconds per step, in a fraction of the time."""
        return screened_time(*self._step_arguments(layout))

    def _step_arguments(
        self, layout: Layout
    ) -> tuple[Architecture, Layout, int, Hardware, Stack, Constants, ParameterShares]:
        asked = self.asked
        return (
            asked.model, layout, asked.sequence, self.hardware, self.stack, self.preset.constants, self._shares(layout),
        )  # fmt: skip


def search(priced: LayoutPrices, devices: int) -> Searched:
    """Return the layouts that fit so many devices, with about their seconds."""
    room = float(priced.hardware.device.memory)
    searched = Searched([], [], 0)
    found, tight, considered = searched.found, searched.tight, 0
    offers = offers_of(priced.stack.name)
    for family in families(priced.asked, devices, priced.hardware.per_node, offers, priced.head):
        reliefs = _reliefs(family[0], offers, priced.stack)
        considered += len(reliefs) * len(family)
        for layout in family:
            if priced.memory(_relieve(layout, *reliefs[-1])) > room:
                break
            for each, memory in _fitting_layouts(priced, layout, reliefs, room):
                fits = FoundLayout(each, priced.screened_seconds(each), memory)
                (found if memory <= priced.room else tight).append(fits)
    return replace(searched, considered=considered)


def best_played(
    priced: LayoutPrices,
    found: Sequence[FoundLayout],
    least: Callable[[FoundLayout], Any],
    played: int = PLAYED,
) -> list[FoundLayout]:
    """Return the layouts found, the best first, with the pipelines of the best ones played.

    Args:
        priced: what was asked.
        found: the layouts, as `search` returns them.
        least: what is least for the best.
        played: how many are played.
    """
    ordered = sorted(found, key=least)
    best = [replace(each, seconds=priced.step(each.layout).seconds) for each in ordered[:played]]
    return [*sorted(best, key=least), *ordered[played:]]


def _reliefs(layout: Layout, offers: Offers, stack: Stack) -> list[tuple[str, str]]:
    """Return the pairs of offload and recomputation that a layout can have, ordered by offload, then by cost.

    Selective recomputation frees the attention's scores, which fused attention does not keep.
    """
    offloads = offers.offload if layout.zero == 3 else [each for each in offers.offload if each != "params"]
    recomputes = [each for each in offers.recompute if not (stack.fused and each == "selective")]
    return [(offload, recompute) for offload in offloads for recompute in recomputes]


def _fitting_layouts(
    priced: LayoutPrices, layout: Layout, reliefs: Sequence[tuple[str, str]], room: float
) -> Iterator[tuple[Layout, float]]:
    """Yield for each offload the least recomputation that fits, and the least that leaves a part of the memory free.

    Where no recomputation is needed, more offload is for nothing.
    """
    for offload, group in groupby(reliefs, key=lambda relief: relief[0]):
        tight = False
        for _, recompute in group:
            relieved = _relieve(layout, offload, recompute)
            memory = priced.memory(relieved)
            if memory <= priced.room:
                yield relieved, memory
                if recompute == reliefs[0][1]:
                    return
                break
            if memory <= room and not tight:
                yield relieved, memory
                tight = True


def _relieve(layout: Layout, offload: str, recompute: str) -> Layout:
    if (offload, recompute) == (layout.offload, layout.recompute):
        return layout  # its degrees have been multiplied already
    return replace(layout, offload=offload, recompute=recompute)

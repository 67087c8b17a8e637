"""Prices: the memory and the time of layouts, for searches of a million of them.

memory   what does not grow with the micro-batch, and what one sample takes: each is counted once for all layouts
         that agree in what decides it
time     a formula stands for the pipeline; the best layouts are then played
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar, cast

from mpkit.devices.hardware import Hardware
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.summary import peak_live
from mpkit.prediction.advice.space import TrainingQuestion
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.fits import FRAGMENTATION
from mpkit.prediction.cost_model.layout import Layout, plan_of
from mpkit.prediction.cost_model.memory import SampleMemory, sample_memory, state_memory
from mpkit.prediction.cost_model.preset import Preset
from mpkit.prediction.cost_model.shares import ParameterShares
from mpkit.prediction.cost_model.stack import Constants, Stack
from mpkit.prediction.cost_model.step import StepTime, screened_time, step_time

__all__ = ["LayoutPrices"]

T = TypeVar("T")

HEADROOM = 0.92
"""The share of a device's memory that a plan may take: predictions of memory are within 5 %, and batches differ."""
SHARED = "pp", "tp", "zero", "replicas", "sharded", "schedule", "virtual_stages", "ep", "etp"
"""The fields of a layout that decide how many parameters its ranks hold."""
LONGEST = 4096
"""The most actions of a schedule that are played for them; `mk.estimate` plays more."""


def _once_for(*fields: str) -> Callable[[Callable[[Any, Layout], T]], Callable[[Any, Layout], T]]:
    """Decorate a method that takes a layout: it runs once for all layouts that agree in these fields."""
    key_of = attrgetter(*fields)

    def decorate(method: Callable[[Any, Layout], T]) -> Callable[[Any, Layout], T]:
        def look_up(self: Any, layout: Layout) -> T:
            known, key = self._known[method.__name__], key_of(layout)
            if key not in known:
                known[key] = method(self, layout)
            return cast(T, known[key])

        return look_up

    return decorate


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
    _known: dict[str, dict[Any, Any]] = field(
        default_factory=lambda: defaultdict(dict), repr=False, compare=False
    )

    @cached_property
    def head(self) -> float:
        """As how many layers the head counts where the software cuts stages by weight or FLOPs; 0: it does not."""
        if self.stack.by_flops:
            return self.asked.model.head_in_flops(self.asked.sequence)
        return self.asked.model.head_in_layers if self.stack.by_weight else 0.0

    @property
    def room(self) -> float:
        """The bytes that a plan may take on a device."""
        return HEADROOM * self.hardware.device.memory

    def plan_of(self, layout: Layout) -> Plan:
        """Return the plan of a layout, in 16 bits that the device has."""
        return replace(plan_of(layout), precision=self.hardware.device.half)

    def handicap(self, layout: Layout) -> float:
        """Return the factor of a layout's time in comparisons: offload has to gain more than predictions are off."""
        return 1.0 if layout.offload == "none" else 1 + self.preset.band

    def memory(self, layout: Layout) -> float:
        """Return the bytes at the peak of the rank with most, with what fragmentation takes."""
        states, sample = self._states(layout), self._sample(layout)
        most = 0.0
        for stage, live in self._fullest(layout):
            stays, converted = states[stage]
            most = max(most, stays + max(converted, sum(sample.stage_bytes(stage, layout, live, self.stack))))
        return most * (1 + FRAGMENTATION)

    @_once_for(*SHARED)
    def _shares(self, layout: Layout) -> ParameterShares:
        """Return the parameters of the ranks."""
        return ParameterShares(self.asked.model, layout, self.stack)

    @_once_for(*SHARED, "offload")
    def _states(self, layout: Layout) -> list[tuple[float, float]]:
        """Return by stage the bytes that do not grow with the micro-batch, and what gradients take for the update."""
        model, shares, device = self.asked.model, self._shares(layout), self.hardware.device
        stages = [state_memory(model, layout, self.stack, shares, each, device) for each in range(layout.pp)]
        return [(sum(states.values()), converted) for states, converted in stages]

    @_once_for("pp", "schedule", "virtual_stages", "cp", "tp", "ep", "etp", "sequence_parallel", "recompute")
    def _sample(self, layout: Layout) -> SampleMemory:
        """Return the bytes of a sample."""
        return sample_memory(self.asked.model, layout, self.asked.sequence, self.stack)

    @_once_for("pp", "schedule", "microbatches", "virtual_stages")
    def _fullest(self, layout: Layout) -> list[tuple[int, float]]:
        """Return the stages of which one holds most, with the micro-batches that each has in flight.

        The first has the embedding and the last the head; of others with as many layers of one kind, it is the one that
        has most micro-batches in flight.
        """
        model, pp = self.asked.model, layout.pp
        live = peak_live(layout.schedule, pp, layout.microbatches, layout.virtual_stages)
        if len(model.kinds()) > 1:
            return list(enumerate(live))
        held = layout.stage_layers(model.layers)
        alike = [[stage for stage in range(pp) if held[stage] == count] for count in set(held)]
        fullest = {0, pp - 1, *(max(stages, key=live.__getitem__) for stages in alike)}
        return [(stage, live[stage]) for stage in sorted(fullest)]

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

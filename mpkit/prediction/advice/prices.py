"""Prices: what layouts are priced for, and the time of the few that are played.

Of all layouts of a search memory and time are screened (`mpkit.prediction.advice.screening`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Any

from mpkit.devices.hardware import Hardware
from mpkit.plan.plan import Plan
from mpkit.prediction.advice.space import TrainingQuestion
from mpkit.prediction.cost_model.layout import Layout, plan_of
from mpkit.prediction.cost_model.preset import Preset
from mpkit.prediction.cost_model.shares import ParameterShares
from mpkit.prediction.cost_model.stack import Stack
from mpkit.prediction.cost_model.step import StepTime, step_time

__all__ = ["LayoutPrices"]

HEADROOM = 0.92
"""The share of a device's memory that a plan may take: predictions of memory are within 5 %, and batches differ."""
SHARED = "pp", "tp", "zero", "replicas", "sharded", "schedule", "virtual_stages", "ep", "etp", "alike"
"""The fields of a layout that decide how many parameters its ranks hold."""
LONGEST = 4096
"""The most actions of a schedule that are played for them; `mk.estimate` plays more."""


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
    _known: dict[Any, ParameterShares] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
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

    def plan_of(self, layout: Layout) -> Plan:
        """Return the plan of a layout, in the 16 bits that the device has, or in the 32 bits of the software."""
        return replace(
            plan_of(layout), precision="full" if self.stack.element == 4 else self.hardware.device.half
        )

    def handicap(self, layout: Layout) -> float:
        """Return the factor of a layout's time in comparisons: offload has to gain more than predictions are off."""
        return 1.0 if layout.offload == "none" else 1 + self.preset.band

    def shares(self, layout: Layout) -> ParameterShares:
        """Return the parameters of the ranks, counted once for all layouts whose ranks hold as many."""
        key = attrgetter(*SHARED)(layout)
        if key not in self._known:
            self._known[key] = ParameterShares(self.asked.model, layout, self.stack)
        return self._known[key]

    def step(self, layout: Layout) -> StepTime:
        """Return the time of a step."""
        asked = self.asked
        return step_time(
            asked.model, layout, asked.sequence, self.hardware, self.stack, self.preset.constants, self.shares(layout),
            LONGEST,
        )  # fmt: skip

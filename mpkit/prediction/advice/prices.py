"""Prices: layouts by the hundred thousand as arrays, what they are priced for, and the time of the few that are played.

bases      layouts that differ in more than the samples of a micro-batch
rows       a base, with the samples of a micro-batch and the number of them
distinct   what many rows share is computed once, for one layout of each kind

Of all layouts of a search memory and time are screened (`mpkit.prediction.advice.screening`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpkit.devices.hardware import Hardware
from mpkit.plan.plan import Plan
from mpkit.prediction.advice.space import TrainingQuestion
from mpkit.prediction.cost_model.layout import Layout, ParameterShares, plan_of
from mpkit.prediction.cost_model.preset import Preset
from mpkit.prediction.cost_model.stack import Stack
from mpkit.prediction.cost_model.step import StepTime, step_time

__all__ = ["Floats", "Indices", "LayoutColumns", "LayoutPrices"]

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LayoutColumns:
    """Layouts as arrays, a row each.

    Attributes:
        bases: layouts, whose micro-batches, recomputation and offload are of no importance.
        base: by row, the number of its base.
        microbatch, microbatches: by row, samples per micro-batch, and micro-batches.
    """

    bases: Sequence[Layout]
    base: Indices
    microbatch: Indices
    microbatches: Indices

    @classmethod
    def of_layouts(cls, layouts: Sequence[Layout]) -> LayoutColumns:
        """Return the columns of some layouts.

        >>> columns = LayoutColumns.of_layouts([Layout(dp=2, microbatch=4), Layout(tp=2)])
        >>> columns.layout(0, recompute="full") == Layout(dp=2, microbatch=4, recompute="full")
        True
        """
        sizes = [
            np.array([getattr(each, name) for each in layouts]) for name in ("microbatch", "microbatches")
        ]
        bases = [each.vary(recompute="none", offload="none") for each in layouts]
        return cls(bases, np.arange(len(layouts)), *sizes)

    def layout(self, row: int, **relief: Any) -> Layout:
        """Return the layout of a row, with this recomputation and offload."""
        m, b = int(self.microbatches[row]), int(self.microbatch[row])
        base: Layout = self.bases[self.base[row]]
        return base.vary(microbatch=b, microbatches=m, **relief)

    def distinct(
        self, *fields: str, microbatch: bool = False, microbatches: bool = False
    ) -> tuple[Indices, list[Layout]]:
        """Return by row the number of its kind, and a layout of each kind.

        Args:
            fields: in which rows of a kind agree.
            microbatch, microbatches: whether they also agree in these.

        >>> columns = LayoutColumns.of_layouts([Layout(dp=2), Layout(dp=2, tp=4), Layout(dp=4)])
        >>> columns.distinct("dp")[0].tolist(), len(columns.distinct("tp", "dp")[1])
        ([0, 0, 1], 3)
        """
        code = _number(map(attrgetter(*fields), self.bases))[self.base]
        for wanted, column in ((microbatch, self.microbatch), (microbatches, self.microbatches)):
            if wanted:
                code = code * (int(column.max()) + 1) + column
        _, first, kind = np.unique(code, return_index=True, return_inverse=True)
        return kind, [self.layout(row) for row in first]


def _number(keys: Iterable[Hashable]) -> Indices:
    """Return the number of each key, counted as they first appear."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys])


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

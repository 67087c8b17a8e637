"""WhatIf: a run beside its step as predicted after some changes, and what each change contributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mpkit.common.display import WidgetResult
from mpkit.plan.plan import Plan
from mpkit.timeline.answer import Answer, Basis
from mpkit.timeline.comparison import Comparison, compare_timelines
from mpkit.timeline.timeline import Timeline

__all__ = ["PredictedStep", "WhatIf"]


@dataclass(frozen=True)
class PredictedStep:
    """A step after some of the changes.

    The three parts are averaged over ranks, and sum to the step time.

    Attributes:
        change: the last of the changes, in words; "" for the run itself.
        plan: the plan.
        timeline: the timeline of that step.
    """

    change: str
    plan: Plan
    timeline: Timeline

    @property
    def step_time(self) -> float:
        """Seconds of the step."""
        return self.timeline.step_time

    @property
    def compute(self) -> float:
        """Seconds in which a rank computes."""
        return sum(self.timeline.busy) / self.timeline.world_size

    @property
    def exposed_communication(self) -> float:
        """Seconds in which a rank communicates and does not compute."""
        return sum(self.timeline.exposed_comm) / self.timeline.world_size

    @property
    def idle(self) -> float:
        """Seconds in which a rank does neither: it waits for what others compute, or for data."""
        return self.step_time - self.compute - self.exposed_communication


@dataclass(frozen=True)
class WhatIf(WidgetResult, Answer):
    """What `Run.what_if` predicts: prints as a table, and shows both timelines on one axis in a notebook.

    Attributes:
        rows: the run's typical step, and the step after each change on top of those before it.
        error: how far off predictions were at most, as a share of the real run's step (`python -m benchmarks costs
            predicted`, on CPU ranks); 0 for a replay of the run's own records; None where no runs have shown it, as on
            GPUs.
        played: bytes by rank and category of the run's own plan, played as the changed one is; None if no plan was
            played. A played rank's buffers include temporaries, which a run does not record: compare `memory` with it.
    """

    rows: tuple[PredictedStep, ...]
    error: float | None
    played: list[dict[str, int]] | None

    @property
    def plan(self) -> Plan:
        """The plan with all changes."""
        return self.rows[-1].plan

    @property
    def before(self) -> Timeline:
        """The run's typical step: the one of median length, on the virtual clock."""
        return self.rows[0].timeline

    @property
    def answer(self) -> Timeline:
        """The predicted step, each rank on a device of its own."""
        return self.rows[-1].timeline

    @property
    def band(self) -> tuple[float, float] | None:
        """The seconds between which real runs were; None where no runs have shown how far off such predictions are."""
        step = self.step_time
        return None if self.error is None else (step * (1 - self.error), step * (1 + self.error))

    @property
    def basis(self) -> Basis:
        """What was measured, and what is assumed."""
        if self.error == 0:
            return Basis("the run's own operations", "each rank on a device of its own, and the link's model")
        return Basis(
            "the time of each of the run's actions",
            "how actions of another size, or a split backward, compare with the measured ones",
        )

    @property
    def causes(self) -> list[tuple[str, float]]:
        """What each change adds to the step, in seconds, on top of those before it; they sum to the whole change."""
        pairs = zip(self.rows, self.rows[1:], strict=False)
        return [(after.change, after.step_time - before.step_time) for before, after in pairs]

    @cached_property
    def comparison(self) -> Comparison:
        """The run beside the prediction, as `mk.compare` puts them: work and idle time by cause, and pictures."""
        return compare_timelines([("run", self.before), ("what if", self.timeline())])

    def gap(self) -> Mapping[str, float]:
        """Return the parts of the difference in seconds, by op and by cause of idle time (`Comparison.gap`)."""
        return self.comparison.gap()

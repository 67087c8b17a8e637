"""Explore a schedule: degrees and times in, a timeline and its figures out, fast enough to follow a slider.

Times are those of a rank's share of the model, however many stages it is cut into: with v stages per rank, each takes
1/v of them and holds 1/v of the activations. Schedules with and without virtual stages can therefore be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B, SCHEDULES
from mpkit.timeline.simulation import simulate
from mpkit.timeline.timeline import Timeline

__all__ = ["Exploration", "ExplorerSetting"]


@dataclass(frozen=True)
class ExplorerSetting:
    """The settings of the explorer.

    Attributes:
        schedule: a name of `mpkit.plan.schedule.NAMES`, or the rows of one's own schedule, as text.
        ranks, microbatches, virtual_stages: degrees; `virtual_stages` counts only for schedules that allow any number
            of stages per rank. One's own rows determine all three.
        forward, input_grad, weight_grad: seconds of a rank's share of the model, per micro-batch.
        hop: seconds that a message takes.
    """

    schedule: str = ONE_F_ONE_B
    ranks: int = 4
    microbatches: int = 8
    virtual_stages: int = 2
    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    hop: float = 0.0

    @property
    def plan(self) -> Plan:
        """Return the Plan for these settings.

        Raises:
            ValueError: the settings cannot work; the message says why.
        """
        if len(self.schedule.split()) > 1:
            return Plan.from_schedule(self.schedule)
        known = SCHEDULES.get(self.schedule)
        v = known.stages_per_rank(self.virtual_stages) if known else 1
        return Plan(pp=self.ranks, schedule=self.schedule, microbatches=self.microbatches, virtual_stages=v)

    def simulate(self) -> Exploration:
        """Simulate the schedule.

        >>> ExplorerSetting("zbv").simulate().figures
        {'bubble': '5.9 %', 'step': '25.5 s', 'peak activations': '4', 'throughput': '0.314 micro-batches/s'}

        Raises:
            ValueError: the plan cannot work.
        """
        plan = self.plan
        schedule = plan.build()
        v = max(schedule.stages / schedule.ranks, 1)
        times = (self.forward / v, self.input_grad / v, self.weight_grad / v)
        peaks = [peak / v for peak in schedule.peak_live]
        return Exploration(plan, schedule, simulate(plan, *times, hop=self.hop), peaks)


@dataclass(frozen=True)
class Exploration:
    """A simulated schedule.

    Attributes:
        plan: its plan.
        schedule: its rows.
        timeline: its simulated timeline.
        peaks: by rank, the most activations held at once, in units of a rank's share for one micro-batch.
    """

    plan: Plan
    schedule: Schedule
    timeline: Timeline
    peaks: list[float]

    @property
    def figures(self) -> dict[str, str]:
        """The figures to look at, in words."""
        t = self.timeline
        rate = self.plan.microbatches / t.step_time if t.step_time else 0.0
        return {
            "bubble": f"{t.bubble:.1%}".replace("%", " %"),
            "step": f"{t.step_time:.3g} s" if t.step_time >= 100 else f"{t.step_time:.1f} s",
            "peak activations": f"{max(self.peaks):g}",
            "throughput": f"{rate:.3g} micro-batches/s",
        }

    @property
    def text(self) -> str:
        """The rows, one per line: to copy, edit and enter as a schedule of one's own."""
        return "\n".join(self.schedule.spelled())

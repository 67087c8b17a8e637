"""What the explorer is set to: degrees and times in; a timeline, figures and rows out, as fast as a slider moves."""

from __future__ import annotations

from dataclasses import dataclass

from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B, SCHEDULES
from mpkit.timeline.simulation import simulate
from mpkit.timeline.timeline import Timeline

__all__ = ["ExplorerSetting"]


@dataclass(frozen=True)
class ExplorerSetting:
    """The settings of the explorer.

    Times are those of a rank's share of the model, however many stages it is cut into: with v stages per rank, each
    takes 1/v of them and holds 1/v of the activations. So schedules with and without virtual stages can be compared.

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

    def simulate(self) -> tuple[Timeline, dict[str, str], str]:
        """Return the timeline, figures that it does not show itself, and the rows, to be copied and edited.

        >>> timeline, figures, rows = ExplorerSetting("zbv").simulate()
        >>> timeline.step_time, figures, len(rows.splitlines())
        (25.5, {'peak activations': '4', 'throughput': '0.314 micro-batches/s'}, 4)

        Raises:
            ValueError: the plan cannot work.
        """
        plan = self.plan
        schedule = plan.build()
        v = max(schedule.stages / schedule.ranks, 1)
        times = (self.forward / v, self.input_grad / v, self.weight_grad / v)
        timeline = simulate(plan, *times, hop=self.hop)
        rate = plan.microbatches / timeline.step_time if timeline.step_time else 0.0
        peak = max(schedule.peak_live) / v
        figures = {"peak activations": f"{peak:g}", "throughput": f"{rate:.3g} micro-batches/s"}
        return timeline, figures, "\n".join(schedule.spelled())

"""Explore schedules: degrees and times in, a timeline and its figures out, fast enough to follow a slider.

Times are of a rank's share of the model, whatever the number of stages that it is cut into: with v stages a rank, each
takes 1/v of them and holds 1/v of the activations. So schedules with and without virtual stages can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpkit.plan import Plan
from mpkit.schedule import Schedule
from mpkit.schedule.catalogue import LOOPED, V_SHAPED
from mpkit.simulation import simulate
from mpkit.timeline import Timeline
from mpkit.tracebacks import public

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["Explored", "Setting", "explore"]


@dataclass(frozen=True)
class Setting:
    """What can be set.

    Attributes:
        schedule: a name of `mpkit.schedule.NAMES`, or the rows of one's own, as text.
        ranks, microbatches, virtual_stages: degrees; the last counts where the schedule has any number of stages a
            rank. Of one's own rows they are what the rows say.
        forward, input_grad, weight_grad: seconds of a rank's share of the model, a micro-batch.
        hop: seconds that a message takes.
    """

    schedule: str = "1f1b"
    ranks: int = 4
    microbatches: int = 8
    virtual_stages: int = 2
    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    hop: float = 0.0

    @property
    def plan(self) -> Plan:
        """The Plan that is set.

        Raises:
            ValueError: it cannot work, with the reason.
        """
        if len(self.schedule.split()) > 1:
            return Plan.from_schedule(self.schedule)
        v = 2 if self.schedule in V_SHAPED else self.virtual_stages if self.schedule in LOOPED else 1
        return Plan(pp=self.ranks, schedule=self.schedule, microbatches=self.microbatches, virtual_stages=v)

    def explored(self) -> Explored:
        """The schedule on the clock.

        >>> Setting("zbv").explored().figures
        {'bubble': '5.9 %', 'step': '25.5 s', 'peak activations': '4', 'throughput': '0.314 micro-batches/s'}

        Raises:
            ValueError: the plan cannot work.
        """
        plan = self.plan
        schedule = plan.build()
        v = max(schedule.stages / schedule.ranks, 1)
        times = (self.forward / v, self.input_grad / v, self.weight_grad / v)
        peaks = [peak / v for peak in schedule.peak_live]
        return Explored(plan, schedule, simulate(plan, *times, hop=self.hop), peaks)


@dataclass(frozen=True)
class Explored:
    """A schedule on the clock.

    Attributes:
        plan: of it.
        schedule: its rows.
        timeline: simulated.
        peaks: by rank, the most activations held at once, in those of a rank's share for one micro-batch.
    """

    plan: Plan
    schedule: Schedule
    timeline: Timeline
    peaks: list[float]

    @property
    def figures(self) -> dict[str, str]:
        """What to look at, in words."""
        t = self.timeline
        rate = self.plan.microbatches / t.makespan if t.makespan else 0.0
        return {
            "bubble": f"{t.bubble:.1%}".replace("%", " %"),
            "step": f"{t.makespan:.3g} s" if t.makespan >= 100 else f"{t.makespan:.1f} s",
            "peak activations": f"{max(self.peaks):g}",
            "throughput": f"{rate:.3g} micro-batches/s",
        }

    @property
    def text(self) -> str:
        """The rows, one a line: to copy, edit and give back as a schedule of one's own."""
        return "\n".join(self.schedule.spelled())


@public
def explore(
    *schedules: str,
    model: torch.nn.Module | None = None,
    data: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **setting: Any,
) -> Any:
    """Schedules beside each other in a notebook, with sliders; text to copy and edit; and a button that runs one.

    Args:
        schedules: one or two names, or rows of your own as text; 1F1B beside ZB-H1 if none are given.
        model, data, loss, optimizer: what the run button trains, as in `Cluster.train`; a small GPT on text, if left
            out.
        setting: what the sliders begin with: ranks, microbatches, virtual_stages, forward, input_grad, weight_grad,
            hop.

    Returns:
        a widget.

    Raises:
        ValueError: a schedule or a setting that there is not.
        ImportError: ipywidgets or anywidget is not installed.
    """
    from dataclasses import fields

    from mpkit.views.explorer import Explorer

    known = [f.name for f in fields(Setting) if f.name != "schedule"]
    if unknown := [name for name in setting if name not in known]:
        raise ValueError(f"explore({unknown[0]}=...): what can be set is {', '.join(known)}")
    if len(schedules) > 2:
        raise ValueError(
            f"explore{schedules}: two at most are shown beside each other: explore{schedules[:2]}, and the dropdowns "
            "have the others"
        )
    settings = [Setting(name, **setting) for name in schedules or ("1f1b", "zb_h1")]
    for each in settings:
        each.plan  # noqa: B018  (refuses what cannot work)
    return Explorer(settings, model=model, data=data, loss=loss, optimizer=optimizer)

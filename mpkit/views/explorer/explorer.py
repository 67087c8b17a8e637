"""mk.explore: compare schedules in a notebook, with sliders; and what they are set to."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mpkit.common.tracebacks import public
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B, SCHEDULES, ZB_H1
from mpkit.timeline.simulation import simulate
from mpkit.timeline.timeline import Timeline

__all__ = ["ExplorerSetting", "explore"]


@public
def explore(*schedules: str, **setting: Any) -> Any:
    """Compare schedules in a notebook, with sliders and text to copy and edit.

    Rows train on ranks too: `cluster.train(model, data, mk.Plan.from_schedule(rows), ...)`.

    Args:
        schedules: one or two names, or rows of your own as text; by default 1F1B and ZB-H1.
        setting: initial values of the sliders: ranks, microbatches, virtual_stages, forward, input_grad, weight_grad,
            hop.

    Returns:
        The widget.

    Raises:
        ValueError: there is no such schedule or setting.
        ImportError: ipywidgets or anywidget is not installed.
    """
    from mpkit.views.explorer.explorer_view import Explorer  # needs the notebook packages

    known = [f.name for f in fields(ExplorerSetting) if f.name != "schedule"]
    if unknown := [name for name in setting if name not in known]:
        raise ValueError(f"explore({unknown[0]}=...): what can be set is {', '.join(known)}")
    given: tuple[Any, ...] = schedules
    if odd := [each for each in given if not isinstance(each, str)]:
        raise ValueError(
            f"explore({odd[0]!r}): a schedule's name or its rows as text, such as explore('gpipe', 'zb_h1')"
        )
    if len(schedules) > 2:
        raise ValueError(
            f"explore{schedules}: two at most are shown side by side: explore{schedules[:2]}, and the dropdowns "
            "have the others"
        )
    settings = [ExplorerSetting(name, **setting) for name in schedules or (ONE_F_ONE_B, ZB_H1)]
    for each in settings:
        each.plan  # noqa: B018  (raises if the settings cannot work)
    return Explorer(settings)


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

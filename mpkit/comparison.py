"""Timelines beside each other: what takes the time in each, and where the difference between two is from.

In a step a rank works, or is idle for one cause or another (`mpkit.idleness`). Averaged over ranks, that adds up to
the makespan. So does a difference between two makespans, op by op and cause by cause: of a prediction and what was
measured, of two schedules, or of one run on two machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit import metrics
from mpkit.idleness import CAUSES, idle_by_cause
from mpkit.plan import Plan
from mpkit.run import Run
from mpkit.shown import Drawn, data_frame
from mpkit.simulation import simulate
from mpkit.timeline import Timeline
from mpkit.times import stage_times
from mpkit.trace import Kind
from mpkit.visible import visible

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Compared", "Comparison", "compare_timelines"]


@dataclass(frozen=True)
class Compared:
    """One timeline of several: its last complete step.

    Attributes:
        name: what it is called.
        timeline: of that step.
        work: seconds a rank, averaged over ranks, by op: "forward of stage 0" and so on.
        idle: likewise, by cause (`mpkit.idleness.CAUSES`).
    """

    name: str
    timeline: Timeline
    work: Mapping[str, float]
    idle: Mapping[str, float]

    @classmethod
    def of(cls, name: str, timeline: Timeline) -> Compared:
        """The figures of a timeline's last complete step."""
        one = timeline.step(timeline.steps[-1]) if timeline.steps else timeline
        idle = dict(zip(CAUSES, idle_by_cause(timeline).mean(axis=0).tolist(), strict=True))
        return cls(name, one, _work(one), idle)


@dataclass(frozen=True)
class Comparison(Drawn):
    """Timelines beside each other: prints as a table, shows itself as pictures on one axis in a notebook.

    Attributes:
        rows: one a timeline.
    """

    rows: tuple[Compared, ...]

    def gap(self, a: str | None = None, b: str | None = None) -> dict[str, float]:
        """Where the difference of two makespans is from: seconds by op and by cause of idle time; they add up to it.

        Args:
            a, b: names of timelines; the first and the last, if left out. What b has more than a counts above 0.

        >>> import mpkit as mk
        >>> found = mk.compare(gpipe=mk.simulate(mk.Plan.gpipe(3, 4)), naive=mk.simulate(mk.Plan.naive_mp(3)))
        >>> {what: round(seconds, 2) for what, seconds in found.gap().items() if seconds}
        {'forward of stage 0': -1.0, 'forward of stage 1': -1.0, 'forward of stage 2': -1.0,
         'backward of stage 0': -2.0, 'backward of stage 1': -2.0, 'backward of stage 2': -2.0}
        """
        first, second = self._named(a, self.rows[0]), self._named(b, self.rows[-1])
        work = [first.work, second.work]
        if _splits(first) != _splits(
            second
        ):  # one's backward is in two halves: only the whole can be compared
            work = [_whole_backwards(of) for of in work]
        ops = list(dict.fromkeys([*work[0], *work[1]]))
        found = {op: work[1].get(op, 0.0) - work[0].get(op, 0.0) for op in ops}
        return found | {f"idle: {cause}": second.idle[cause] - first.idle[cause] for cause in CAUSES}

    def _named(self, name: str | None, default: Compared) -> Compared:
        if name is None:
            return default
        for row in self.rows:
            if row.name == name:
                return row
        raise ValueError(f"gap({name!r}): the timelines are {', '.join(repr(row.name) for row in self.rows)}")

    def to_dataframe(self) -> pd.DataFrame:
        """A row a timeline: name, clock, step_time, bubble, seconds of work and of idle time by cause, peak memory."""
        return data_frame(
            [
                {
                    "name": row.name,
                    "clock": row.timeline.clock,
                    "step_time": row.timeline.step_time,
                    "makespan": row.timeline.makespan,
                    "bubble": row.timeline.bubble,
                    "work": sum(row.work.values()),
                }
                | {f"idle: {cause}": seconds for cause, seconds in row.idle.items()}
                | {"peak_memory": max((held["total"] for held in row.timeline.peak_memory), default=0)}
                for row in self.rows
            ]
        )

    def figure(self) -> Any:
        """Where the time goes, a plotly Figure: a stacked bar a timeline, of work and of idle time by cause.

        Raises:
            ImportError: plotly is not installed.
        """
        from mpkit.views.comparison import comparison_figure

        return comparison_figure(self)

    def show(self) -> Any:
        """The interactive timelines under each other on one axis, in a notebook."""
        from mpkit.views.comparison import comparison_view

        return comparison_view(self)

    def _svg(self) -> str:
        from mpkit.views.comparison_svg import comparison_svg

        return comparison_svg(self)

    def __str__(self) -> str:
        from mpkit.views.comparison_text import comparison_text

        return comparison_text(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {}
        with suppress(ImportError):  # then the picture has to do
            shown = self.show()._repr_mimebundle_()
            bundle = dict(shown[0] if isinstance(shown, tuple) else shown)
        return bundle | super()._repr_mimebundle_(include, exclude)


def compare_timelines(given: Sequence[tuple[str, Timeline | Run]]) -> Comparison:
    """What `mk.compare` is of Timelines and Runs, each with its name or ""."""
    found: dict[str, Timeline] = {}
    if (
        len(given) == 1
        and isinstance(given[0][1], Run)
        and Plan.from_json(given[0][1].trace.meta["plan"]).pp > 1
    ):
        found["predicted"] = predicted(given[0][1].timeline())
        given = [("measured", given[0][1])]
    for name, each in given:
        timeline = each.timeline() if isinstance(each, Run) else each
        if not isinstance(timeline, Timeline):
            raise ValueError(
                f"compare({each!r}): give Timelines or finished Runs, such as "
                "compare(mk.simulate(plan), run) or compare(before=run.timeline(), after=run.timeline(hardware='cpu'))"
            )
        name = visible(name or _title(timeline))
        found[name if name not in found else f"{name} ({1 + sum(n.startswith(name) for n in found)})"] = (
            timeline
        )
    if not found:
        raise ValueError(
            "compare(): nothing to compare; give Timelines or finished Runs, such as compare(run)"
        )
    return Comparison(tuple(Compared.of(name, timeline) for name, timeline in found.items()))


def predicted(timeline: Timeline) -> Timeline:
    """The schedule of a pipeline's timeline, simulated with the mean times a stage of its last step.

    Raises:
        ValueError: it is of no pipeline.
    """
    last = timeline.step(timeline.steps[-1])
    return simulate(Plan.from_json(timeline.meta["plan"]), **stage_times(last))


def _work(one: Timeline) -> dict[str, float]:
    """Seconds a rank by kind and stage, averaged over ranks, without the waits within actions."""
    work = metrics.work(one.spans)
    kinds = np.unique(work[["kind", "stage"]])
    found = {}
    for kind, stage in kinds.tolist():
        of = work[(work["kind"] == kind) & (work["stage"] == stage)]
        word = Kind(kind).word.replace("_", " ")
        found[f"{word} of stage {stage}" if stage >= 0 else word] = float((of["end"] - of["start"]).sum())
    within = metrics.waits_within(one.spans)
    waited = float((within["end"] - within["start"]).sum())
    whole = sum(found.values())
    return {what: seconds * (1 - waited / whole) / one.world_size for what, seconds in found.items()}


def _splits(row: Compared) -> bool:
    return any(op.startswith("weight grad") for op in row.work)


def _whole_backwards(work: Mapping[str, float]) -> dict[str, float]:
    """The two halves of a stage's backward as one op."""
    found: dict[str, float] = {}
    for op, seconds in work.items():
        whole = op.replace("input grad", "backward").replace("weight grad", "backward")
        found[whole] = found.get(whole, 0.0) + seconds
    return found


def _title(timeline: Timeline) -> str:
    """Such as "1f1b, simulated"."""
    plan = timeline.meta.get("plan")
    what = timeline.meta.get("schedule", "timeline")
    if plan is not None:
        known = Plan.from_json(plan)
        what = (
            known.describe().split(":")[0]
            if known.pp == 1
            else str(getattr(known.schedule, "name", known.schedule))
        )
    hardware = timeline.meta.get("hardware", "")
    on = f", on {hardware}" if hardware and timeline.clock != "simulated" else ""
    return f"{what}, {timeline.clock}{on}"

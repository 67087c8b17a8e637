"""Compare timelines: what takes the time in each, and where the difference between two of them comes from.

At any moment of a step a rank either works or is idle for one of several causes (`mpkit.timeline.idleness`). Averaged
over ranks, these times add up to the step. The difference between two steps therefore splits the same way, op
by op and cause by cause, whether it is between a prediction and a measurement, two schedules, or two machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from mpkit.common.display import ChartedResult, WidgetResult
from mpkit.common.safe_text import visible
from mpkit.common.tracebacks import public
from mpkit.plan.plan import Plan
from mpkit.timeline import metrics
from mpkit.timeline.answer import Answer, HasTimeline
from mpkit.timeline.idleness import CAUSES, idle_by_cause
from mpkit.timeline.metrics import stage_times
from mpkit.timeline.simulation import simulate
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind


@dataclass(frozen=True)
class ComparedStep:
    """The last complete step of one of the compared timelines.

    Attributes:
        name: the timeline's name.
        timeline: the timeline of that step.
        work: seconds per rank, averaged over ranks, by op, such as "forward of stage 0".
        idle: seconds per rank, averaged over ranks, by cause (`mpkit.timeline.idleness.CAUSES`).
        memory: bytes at the peak of the rank with most; 0 where a simulation counts micro-batches instead.
    """

    name: str
    timeline: Timeline
    work: Mapping[str, float]
    idle: Mapping[str, float]
    memory: float = 0.0

    @classmethod
    def from_timeline(cls, name: str, timeline: Timeline, memory: float = 0.0) -> ComparedStep:
        """Compute the figures of a timeline's last complete step."""
        one = timeline.last_step
        idle = dict(zip(CAUSES, idle_by_cause(timeline).mean(axis=0).tolist(), strict=True))
        return cls(name, one, _work(one), idle, memory)


@dataclass(frozen=True)
class Comparison(WidgetResult, ChartedResult):
    """Several timelines compared: prints as a table, and shows itself as pictures on one axis in a notebook.

    The chart (`figure`) shows where the time goes: one stacked bar per timeline, of work and of idle time by cause.

    Attributes:
        rows: one per timeline.
    """

    rows: tuple[ComparedStep, ...]

    def gap(self, a: str | None = None, b: str | None = None) -> dict[str, float]:
        """Return the parts of the difference of two steps, in seconds by op and by cause of idle time.

        Args:
            a, b: names of timelines; by default the first and the last. Values are positive where b takes longer.

        >>> import mpkit as mk
        >>> found = mk.compare(gpipe=mk.simulate(mk.Plan.gpipe(3, 4)), naive=mk.simulate(mk.Plan.naive_mp(3)))
        >>> {what: round(seconds, 2) for what, seconds in found.gap().items() if seconds}
        {'forward of stage 0': -1.0, 'forward of stage 1': -1.0, 'forward of stage 2': -1.0,
         'backward of stage 0': -2.0, 'backward of stage 1': -2.0, 'backward of stage 2': -2.0}
        """
        first, second = self._find_row(a, self.rows[0]), self._find_row(b, self.rows[-1])
        work = [first.work, second.work]
        splits = [any(op.startswith("weight grad") for op in each) for each in work]
        if splits[0] != splits[1]:  # if only one splits its backwards in two, only whole ones can be compared
            work = [_whole_backwards(of) for of in work]
        ops = dict.fromkeys([*work[0], *work[1]])
        differences = {op: work[1].get(op, 0.0) - work[0].get(op, 0.0) for op in ops}
        return differences | {f"idle: {cause}": second.idle[cause] - first.idle[cause] for cause in CAUSES}

    def _find_row(self, name: str | None, default: ComparedStep) -> ComparedStep:
        for row in (default,) if name is None else self.rows:
            if name in (None, row.name):
                return row
        raise ValueError(f"gap({name!r}): the timelines are {', '.join(repr(row.name) for row in self.rows)}")


@public
def compare(*timelines: HasTimeline, **named: HasTimeline) -> Comparison:
    """Put timelines below each other on one axis, and say what takes the time in each.

    A single run of a pipeline is compared with its prediction: the same schedule simulated with the mean times of
    its last step.

    Args:
        timelines: Timelines, or Runs, each on its own clock; they are named after their schedule and clock.
        named: more timelines, under names of your own.

    Returns:
        An object that prints as a table and shows itself in a notebook.

    Raises:
        ValueError: nothing to compare, or an argument that is neither a Timeline nor a Run.

    >>> import mpkit as mk
    >>> times = dict(forward=1, input_grad=1, weight_grad=1)
    >>> both = mk.compare(mk.simulate(mk.Plan.gpipe(4, 8), **times),
    ...                   mk.simulate(mk.Plan.pipeline("zb_h1", 4, 8), **times))
    >>> print(both)
                      step time     bubble       work    warm-up  dependency  cool-down
    gpipe, simulated     33.0 s     27.3 %     24.0 s   1.50 s      4.50 s     3.00 s
    zb_h1, simulated     27.0 s     11.1 %     24.0 s   1.50 s      1.50 s        0 s
    Work and idle time by cause: seconds per rank, averaged over ranks; they add up to the step.
    <BLANKLINE>
    zb_h1, simulated is 6.00 s (18.2%) shorter than gpipe, simulated, of it
        idle: dependency  -3.00 s
        idle: cool-down   -3.00 s
    """
    return compare_timelines([*(("", each) for each in timelines), *named.items()])


def compare_timelines(given: Sequence[tuple[str, Any]]) -> Comparison:
    """Return the Comparison that `mk.compare` makes of Runs, Timelines and other answers, each with its name or ""."""
    timelines: dict[str, Timeline] = {}
    memory: dict[str, float] = {}
    if len(given) == 1 and isinstance(given[0][1], HasTimeline) and not isinstance(given[0][1], Answer):
        measured = given[0][1].timeline()
        if "plan" in measured.meta and Plan.from_json(measured.meta["plan"]).pp > 1:
            timelines["predicted"] = simulate_means(measured)
            given = [("measured", measured)]
    for name, each in given:
        timeline = each.timeline() if isinstance(each, HasTimeline) else None
        if not isinstance(timeline, Timeline):
            raise ValueError(
                f"compare({each!r}): give Timelines or finished Runs, such as "
                "compare(mk.simulate(plan), run) or compare(before=run.timeline(), after=run.timeline(hardware='cpu'))"
            )
        title = visible(name or _title(timeline))
        names = (title if number == 1 else f"{title} ({number})" for number in count(1))
        name = next(each for each in names if each not in timelines)
        timelines[name], memory[name] = timeline, _peak_memory(each, timeline)
    if not timelines:
        raise ValueError(
            "compare(): nothing to compare; give Timelines or finished Runs, such as compare(run)"
        )
    steps = (
        ComparedStep.from_timeline(name, each, memory.get(name, 0.0)) for name, each in timelines.items()
    )
    return Comparison(tuple(steps))


def _peak_memory(given: HasTimeline, timeline: Timeline) -> float:
    """Return the bytes at the peak of the rank with most; 0 for a simulation, which counts micro-batches."""
    answer = given if isinstance(given, Answer) else timeline
    if isinstance(answer, Timeline) and answer.clock == "simulated":
        return 0.0
    return max((sum(held.values()) for held in answer.memory), default=0.0)


def simulate_means(timeline: Timeline) -> Timeline:
    """Simulate the schedule of a pipeline's timeline with the mean times per stage of its last step."""
    return simulate(Plan.from_json(timeline.meta["plan"]), **stage_times(timeline.last_step))


def _work(one: Timeline) -> dict[str, float]:
    """Return seconds per rank by kind and stage, averaged over ranks, without the waits within actions."""
    words = {
        (kind, stage): Kind(kind).word.replace("_", " ") + (f" of stage {stage}" if stage >= 0 else "")
        for kind, stage in np.unique(metrics.work(one.spans)[["kind", "stage"]]).tolist()
    }
    seconds_by_work = dict.fromkeys(words.values(), 0.0)
    for rank in range(one.world_size):
        mine = one.spans[one.spans["rank"] == rank]
        work, worked = metrics.work(mine), metrics.work_times(mine)
        for (kind, stage), what in words.items():
            of = (work["kind"] == kind) & (work["stage"] == stage)
            seconds_by_work[what] += float(worked[of].sum()) / one.world_size
    return seconds_by_work


def _whole_backwards(work: Mapping[str, float]) -> dict[str, float]:
    """Merge the two halves of each stage's backward into one op."""
    merged: dict[str, float] = {}
    for op, seconds in work.items():
        whole = op.replace("input grad", "backward").replace("weight grad", "backward")
        merged[whole] = merged.get(whole, 0.0) + seconds
    return merged


def _title(timeline: Timeline) -> str:
    """Return a title such as "1f1b, simulated"."""
    what = timeline.meta.get("schedule", "timeline")
    if "plan" in timeline.meta:
        plan = Plan.from_json(timeline.meta["plan"])
        schedule = str(getattr(plan.schedule, "name", plan.schedule))
        what = plan.describe().split(":")[0] if plan.pp == 1 else schedule
    hardware = timeline.meta.get("hardware", "")
    on = f", on {hardware}" if hardware and timeline.clock != "simulated" else ""
    return f"{what}, {timeline.clock}{on}"

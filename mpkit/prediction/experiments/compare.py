"""Runs that exist already, beside each other.

bubbles    against the number of micro-batches: runs as points, the schedule's formula as a line
memory     what each rank held when it held most
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpkit.common.display import DrawnResult, data_frame
from mpkit.common.tracebacks import public
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import GPIPE, NAIVE
from mpkit.timeline.answer import HasTimeline
from mpkit.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BubbleCurve", "BubblePoint", "MemoryByPlan", "bubble_curve", "memory_by_plan"]

# ---- bubbles by micro-batches


@dataclass(frozen=True)
class BubblePoint:
    """One run, in its last complete step.

    Attributes:
        microbatches: m.
        formula: the bubble in theory; None where there is no formula.
        bubble: the bubble of the run.
        step_time: seconds per step.
    """

    microbatches: int
    formula: float | None
    bubble: float
    step_time: float


@dataclass(frozen=True)
class BubbleCurve(DrawnResult):
    """Bubbles by micro-batches: prints as a table, and shows itself as points on the formula's line in a notebook.

    Attributes:
        plan: the plan of the run with the most micro-batches; it has the schedule, p and v of the line.
        points: one per run, by m.
    """

    plan: Plan
    points: tuple[BubblePoint, ...]

    def formula(self, m: int) -> float | None:
        """Return the bubble in theory with m micro-batches; None where the papers give none.

        >>> import mpkit as mk
        >>> mk.experiments.bubble_curve([mk.simulate(mk.Plan.gpipe(4, 8))]).formula(16)
        0.15789473684210525
        """
        named = isinstance(self.plan.schedule, str)
        return _theory(replace(self.plan, microbatches=m)) if named else None

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row per run: formula, measured (the bubble) and seconds per step, by the number of micro-batches."""
        rows = [
            {
                "micro-batches": p.microbatches,
                "formula": p.formula,
                "measured": p.bubble,
                "seconds per step": p.step_time,
            }
            for p in self.points
        ]
        return data_frame(rows).set_index("micro-batches")


@public
def bubble_curve(runs: Iterable[HasTimeline]) -> BubbleCurve:
    """Compare the bubbles of runs that differ in their micro-batches with the schedule's formula.

    Args:
        runs: Runs or Timelines of pipelines with the same number of stages; naive model parallelism is a pipeline with
            m = 1.

    Raises:
        ValueError: there is none, one is no pipeline, or they differ in more than the number of micro-batches.

    >>> import mpkit as mk
    >>> print(bubble_curve(mk.simulate(mk.Plan.gpipe(4, m)) for m in (1, 2, 8)))
    Bubble by micro-batches: gpipe, 4 stages
    micro-batches  formula  bubble  step time
                1   75.0 %  75.0 %     12.0 s
                2   60.0 %  60.0 %     15.0 s
                8   27.3 %  27.3 %     33.0 s
    """
    given: list[Any] = list(runs)
    if wrong := [each for each in given if not isinstance(each, HasTimeline)]:
        raise ValueError(
            f"bubble_curve([{wrong[0]!r}]): give Runs or Timelines, such as "
            "[mk.simulate(mk.Plan.gpipe(4, m)) for m in (1, 2, 4)]"
        )
    timelines: list[Timeline] = [each.timeline() for each in given]
    by_m: list[tuple[Plan, Timeline]] = sorted(
        ((Plan.from_json(each.meta["plan"]), each) for each in timelines), key=lambda it: it[0].microbatches
    )
    if not by_m:
        raise ValueError("bubble_curve([]): give one run or more, such as [mk.simulate(mk.Plan.gpipe(4, 8))]")
    last = by_m[-1][0]
    for plan, _ in by_m:
        if plan.pp < 2:
            raise ValueError(
                f"bubble_curve: {plan!r} is no pipeline; pp=2 or more has a bubble, as Plan.gpipe(4, 8) has"
            )
        if _shape(plan) != _shape(last):
            raise ValueError(
                f"bubble_curve: {plan!r} and {last!r} differ in more than their micro-batches, so that no line fits "
                "both: make a curve of each"
            )
    points = [
        BubblePoint(plan.microbatches, _theory(plan), timeline.bubble, timeline.step_time)
        for plan, timeline in by_m
    ]
    return BubbleCurve(last, tuple(points))


def _shape(plan: Plan) -> tuple[object, ...]:
    """Return what runs on one curve have in common: with one micro-batch, naive model parallelism is GPipe."""
    schedule = GPIPE if plan.schedule == NAIVE and plan.microbatches == 1 else plan.schedule
    return schedule, plan.pp, plan.virtual_stages, plan.recompute


def _theory(plan: Plan) -> float | None:
    exact = plan.bubble_in_theory
    return None if exact is None else float(exact)


# ---- memory by plan


@dataclass(frozen=True)
class MemoryByPlan(DrawnResult):
    """Memory by plan, rank and category: prints as a table, and shows itself as stacked bars in a notebook.

    Attributes:
        timelines: the last complete step of each run, by its name.
    """

    timelines: Mapping[str, Timeline]

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row per plan and rank: bytes by category, each at its own peak, and the most held at once, total."""
        return data_frame(
            [
                {"plan": name, "rank": rank, **held}
                for name, timeline in self.timelines.items()
                for rank, held in enumerate(timeline.peak_memory)
            ]
        )


@public
def memory_by_plan(runs: Mapping[str, HasTimeline]) -> MemoryByPlan:
    """Compare what the ranks of several runs held when they held most, on one scale.

    Args:
        runs: Runs or Timelines by name, all with the same unit of memory.

    Raises:
        ValueError: there is none, one is no run, or simulations are mixed with runs.

    >>> import mpkit as mk
    >>> plans = {"GPipe": mk.Plan.gpipe(2, 4), "1F1B": mk.Plan.pipeline("1f1b", 2, 4)}
    >>> print(memory_by_plan({name: mk.simulate(plan) for name, plan in plans.items()}))
    Most memory per rank, by plan
           rank      activations
    GPipe  0     4 micro-batches
    GPipe  1     4 micro-batches
    1F1B   0     2 micro-batches
    1F1B   1       1 micro-batch
    """
    given: Any = runs
    if not isinstance(given, Mapping) or not given:
        raise ValueError(
            f"memory_by_plan({runs!r}): give Runs or Timelines by name, such as {{'GPipe': gpipe, '1F1B': other}}"
        )
    last: dict[str, Timeline] = {}
    for name, run in given.items():
        timeline = run.timeline() if isinstance(run, HasTimeline) else None
        if not isinstance(timeline, Timeline):
            raise ValueError(
                f"memory_by_plan({{{name!r}: {run!r}}}): give a Run or a Timeline, such as run.timeline()"
            )
        last[name] = timeline.step(timeline.steps[-1]) if timeline.steps else timeline
    if len({timeline.clock == "simulated" for timeline in last.values()}) > 1:
        raise ValueError(
            "memory_by_plan: simulations count micro-batches and runs count bytes, which have no common scale: "
            "give the one or the other"
        )
    return MemoryByPlan(last)

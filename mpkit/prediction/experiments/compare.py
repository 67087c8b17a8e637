"""Runs that exist already, side by side: bubbles against the number of micro-batches, and memory by rank."""

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


# ---- bubbles by micro-batches


@dataclass(frozen=True)
class BubbleCurve(DrawnResult):
    """Bubbles by micro-batches: prints as a table, and shows itself as points on the formula's line in a notebook."""

    plan: Plan  # of the run with the most micro-batches; it has the schedule, p and v of the line
    runs: Mapping[int, Timeline]  # by number of micro-batches, m

    def formula(self, m: int) -> float | None:
        """Return the bubble in theory with m micro-batches; None where the papers give none.

        >>> BubbleCurve(Plan.gpipe(4, 8), {}).formula(2)
        0.6
        """
        named = isinstance(self.plan.schedule, str)
        exact = replace(self.plan, microbatches=m).bubble_in_theory if named else None
        return None if exact is None else float(exact)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row per run: formula, measured (the bubble) and seconds per step, by the number of micro-batches."""
        rows = [(m, self.formula(m), run.bubble, run.step_time) for m, run in self.runs.items()]
        columns = ["micro-batches", "formula", "measured", "seconds per step"]
        return data_frame(rows, columns).set_index("micro-batches")


@public
def bubble_curve(runs: Iterable[HasTimeline]) -> BubbleCurve:
    """Compare the bubbles of runs that differ in their micro-batches with the schedule's formula.

    Args:
        runs: Runs or Timelines of pipelines with equally many stages; naive model parallelism counts as m = 1.

    Raises:
        ValueError: there is none, one is not a pipeline, or they differ in more than the number of micro-batches.

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
    timelines = [each.timeline() for each in given]
    plans = [Plan.from_json(each.meta["plan"]) for each in timelines]
    if not plans:
        raise ValueError("bubble_curve([]): give one run or more, such as [mk.simulate(mk.Plan.gpipe(4, 8))]")
    last = max(plans, key=lambda plan: plan.microbatches)
    for plan in plans:
        if plan.pp < 2:
            raise ValueError(
                f"bubble_curve: {plan!r} is no pipeline; pp=2 or more has a bubble, as Plan.gpipe(4, 8) has"
            )
        if _shape(plan) != _shape(last):
            raise ValueError(
                f"bubble_curve: {plan!r} and {last!r} differ in more than their micro-batches, so that no line fits "
                "both: make a curve of each"
            )
    by_m = {plan.microbatches: each for plan, each in zip(plans, timelines, strict=True)}
    return BubbleCurve(last, dict(sorted(by_m.items())))


def _shape(plan: Plan) -> tuple[object, ...]:
    """Return what runs on one curve share; with one micro-batch, naive model parallelism is GPipe."""
    schedule = GPIPE if plan.schedule == NAIVE and plan.microbatches == 1 else plan.schedule
    return schedule, plan.pp, plan.virtual_stages, plan.recompute


# ---- memory by plan


@dataclass(frozen=True)
class MemoryByPlan(DrawnResult):
    """Memory by plan, rank and category: prints as a table, and shows itself as stacked bars in a notebook."""

    timelines: Mapping[str, Timeline]  # the last complete step of each run, by its name


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
    wrong = not isinstance(given, Mapping) or not given
    if wrong or not all(isinstance(each, HasTimeline) for each in given.values()):
        raise ValueError(
            f"memory_by_plan({runs!r}): give Runs or Timelines by name, such as {{'GPipe': gpipe, '1F1B': other}}"
        )
    timelines: dict[str, Timeline] = {name: run.timeline() for name, run in given.items()}
    if len({timeline.clock == "simulated" for timeline in timelines.values()}) > 1:
        raise ValueError(
            "memory_by_plan: simulations count micro-batches and runs count bytes, which have no common scale: "
            "give the one or the other"
        )
    return MemoryByPlan({name: each.last_step for name, each in timelines.items()})

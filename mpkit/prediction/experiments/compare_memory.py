"""The memory of runs that exist already, beside each other: what each rank held when it held most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpkit.common.display import DrawnResult, data_frame
from mpkit.common.tracebacks import public
from mpkit.timeline.answer import HasTimeline
from mpkit.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MemoryByPlan", "memory_by_plan"]


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

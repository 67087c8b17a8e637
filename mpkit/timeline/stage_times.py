"""The mean times of a run's actions by stage, for simulations and searches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.common.tracebacks import public
from mpkit.timeline.timeline import HasTimeline, Timeline
from mpkit.trace import Kind, Lane

__all__ = ["stage_times"]

Array = npt.NDArray[Any]


@public
def stage_times(run: HasTimeline | Timeline) -> dict[str, Any]:
    """Return how long a run's forwards and backwards took, by stage, and its messages, as arguments for `simulate`.

    The first step is left out if there are others, since it is slower. A backward that was not split is assumed to
    spend half its time on the gradients of the inputs and half on those of the weights. Recomputation does not count.

    Args:
        run: a finished pipeline, or the Timeline of one, such as on other hardware: run.timeline(hardware="h100").

    Returns:
        "forward", "input_grad", "weight_grad": seconds by stage; "hop": seconds that a message takes; and "backward",
        if a stage had both whole backwards and split ones.

    Raises:
        ValueError: some stage has no forward in the timeline, or there are no stages.

    >>> import mpkit as mk
    >>> t = mk.simulate(mk.Plan.pipeline("zb_h1", 2, 4), [1, 2], [3, 4], 0.5, hop=0.25)
    >>> times = mk.stage_times(t)
    >>> times
    {'forward': [1.0, 2.0], 'input_grad': [3.0, 4.0], 'weight_grad': [0.5, 0.5], 'hop': 0.25}
    >>> mk.simulate(mk.Plan.pipeline("zb_h1", 2, 4), **times).makespan == t.makespan
    True
    """
    timeline: Any = run if isinstance(run, Timeline) else getattr(run, "timeline", lambda: None)()
    if not isinstance(timeline, Timeline):
        raise ValueError(f"stage_times({run!r}): give a finished Run of a pipeline, or the Timeline of one")
    spans = timeline.spans
    later = spans["step"] > spans["step"].min(initial=0)
    if later.any() and len(timeline.steps) > 1:
        spans = spans[later]
    whole = spans[(spans["lane"] == Lane.COMPUTE) & (spans["depth"] == 0) & (spans["stage"] >= 0)]
    stages = int(whole["stage"].max(initial=-1)) + 1
    forward, i, w, b = (
        _means(whole[whole["kind"] == kind], stages)
        for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.BACKWARD)
    )
    if not stages or np.isnan(forward).any():
        raise ValueError(
            f"stage_times({run!r}): not every stage's forward was seen. Give a finished Run of a pipeline, such as "
            'cluster.train(..., mk.Plan.pipeline("1f1b", 4, 8), ...).wait()'
        )
    times = {
        "forward": forward.tolist(),
        "input_grad": np.where(np.isnan(i), b / 2, i).tolist(),
        "weight_grad": np.where(np.isnan(w), b / 2, w).tolist(),
        "hop": _hop(timeline, spans),
    }
    if not np.isnan(
        i + b
    ).all():  # some backwards of a stage were split and some not: the latter take less than I + W
        times["backward"] = np.where(np.isnan(b), i + w, b).tolist()
    return times


def _means(spans: Array, stages: int) -> Array:
    """Return the mean length by stage; nan for a stage without spans."""
    count = np.bincount(spans["stage"], minlength=stages)
    total = np.bincount(spans["stage"], spans["end"] - spans["start"], minlength=stages)
    means: Array = np.divide(total, count, out=np.full(stages, np.nan), where=count > 0)
    return means


def _hop(timeline: Timeline, spans: Array) -> float:
    """Return the mean time of a message with outputs or gradients (F or B in its tag); 0 if there are none."""
    received = spans[spans["kind"] == Kind.RECV]
    tags = [timeline.names[group].partition("#")[2] for group in received["group"]]
    these = received[[tag[:1] in ("F", "B") for tag in tags]] if tags else received
    return float((these["end"] - these["start"]).mean()) if len(these) else 0.0

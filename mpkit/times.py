"""The mean times of a run's actions by stage, which simulations and searches take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline import Timeline
from mpkit.trace import Kind, Lane
from mpkit.tracebacks import public

if TYPE_CHECKING:
    from mpkit.run import Run

__all__ = ["stage_times"]

Array = npt.NDArray[Any]


@public
def stage_times(run: Run | Timeline) -> dict[str, Any]:
    """How long a run's forwards and backwards took, by stage, and its messages: what `simulate` takes.

    Of all steps but the first, which is slower, if there are others. A backward that was not split is taken to be half
    gradients of the inputs, half of the weights. Forwards that were done again are not in it.

    Args:
        run: a finished pipeline, or the Timeline of one, such as of other hardware: run.timeline(hardware="h100").

    Returns:
        "forward", "input_grad", "weight_grad": seconds by stage; "hop": seconds that a message takes; and "backward",
        where a stage had both whole backwards and split ones.

    Raises:
        ValueError: no stages were seen.

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
    found = {
        "forward": forward.tolist(),
        "input_grad": np.where(np.isnan(i), b / 2, i).tolist(),
        "weight_grad": np.where(np.isnan(w), b / 2, w).tolist(),
        "hop": _hop(timeline, spans),
    }
    if not np.isnan(
        i + b
    ).all():  # some backwards of a stage were split and some not: those take less than I + W
        found["backward"] = np.where(np.isnan(b), i + w, b).tolist()
    return found


def _means(spans: Array, stages: int) -> Array:
    """By stage the mean length; nan of none."""
    count = np.bincount(spans["stage"], minlength=stages)
    total = np.bincount(spans["stage"], spans["end"] - spans["start"], minlength=stages)
    means: Array = np.divide(total, count, out=np.full(stages, np.nan), where=count > 0)
    return means


def _hop(timeline: Timeline, spans: Array) -> float:
    """The mean time of a message with outputs or gradients (F and B in its tag); 0 if there are none."""
    received = spans[spans["kind"] == Kind.RECV]
    tags = [timeline.names[group].partition("#")[2] for group in received["group"]]
    these = received[[tag[:1] in ("F", "B") for tag in tags]] if tags else received
    return float((these["end"] - these["start"]).mean()) if len(these) else 0.0

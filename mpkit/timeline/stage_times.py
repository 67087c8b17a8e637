"""The mean times of a run's actions by stage, for simulations and searches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpkit.trace import Kind, Lane

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline

__all__ = ["stage_times"]

Array = npt.NDArray[Any]


def stage_times(timeline: Timeline) -> dict[str, Any]:
    """Return the mean times of a timeline's actions, by stage; see `Timeline.stage_times`.

    Raises:
        ValueError: some stage has no forward in the timeline, or there are no stages.
    """
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
            f"{timeline!r}.stage_times(): not every stage's forward was seen. Take it of a finished pipeline, such as "
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

"""A step of a run, as an observation that constants are fitted to."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from mpkit.prediction.cost_model.estimate import estimate

if TYPE_CHECKING:
    from mpkit.devices.hardware import Hardware
    from mpkit.launch.session.run import Run
    from mpkit.prediction.cost_model.calibrate import Observation
    from mpkit.strategies.job.job import TrainJob

__all__ = ["observe_run"]


def observe_run(run: Run, job: TrainJob, hardware: Hardware | str | None = None) -> Observation:
    """Return a step with its measured time: `Run.measured_step`."""
    timeline, inputs = run.timeline(hardware, clock="virtual"), job.what.batches
    if len(timeline.steps) < 2:
        raise ValueError("the first step sets up and is not counted: train for two steps or more, steps=4")
    shape: tuple[int, ...] = tuple(getattr(inputs[0][0], "shape", ())) if isinstance(inputs, list) else ()
    if len(shape) != 2:
        raise ValueError("only of batches in memory, tokens of [samples, sequence], is the sequence known")
    machine = hardware or timeline.meta.get("hardware") or "cpu"
    guess = estimate(
        job.what.model,
        run.plan,
        machine,
        global_batch=int(shape[0]),
        sequence=int(shape[1]),
        stack="mpkit",
    )
    return guess.measured(float(median(timeline.step(i).step_time for i in timeline.steps[1:])))

"""What a training under a launcher adds: what all processes must have in common, and a line in rank 0's terminal."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpkit.common.exceptions import report
from mpkit.common.units import percent, seconds
from mpkit.devices.placement_notes import spans_nodes

if TYPE_CHECKING:
    from mpkit.launch.session.run import Run
    from mpkit.launch.torchrun import Launcher
    from mpkit.strategies.prepare.prepare import TrainJob
    from mpkit.timeline.live_timeline import LiveFeed

__all__ = ["ProgressLine", "agree_on_job"]

LINE_EVERY = 1.0, 30.0
"""Seconds between two lines: in a terminal, where each replaces the last one; elsewhere, as in a job's log."""

CLEAR = "\r\x1b[K"
"""Moves to the beginning of a terminal's line and empties it."""


def agree_on_job(launcher: Launcher | None, make_job: Callable[[], TrainJob]) -> TrainJob:
    """Return the job; under a launcher, once all processes have found that they ask for the same.

    Which steps are drawn to be verified, rank 0 decides. Warn if the plan's features work against each other, and in
    rank 0's process if tensor parallelism spans nodes.
    """
    from mpkit.strategies.prepare.prepare import warn_if_unwise

    if launcher is None:
        job = make_job()
        warn_if_unwise(job.plan)
        return job
    job = launcher.same("this training", make_job, _facts_in_common)
    job = replace(job, how=replace(job.how, verified=tuple(launcher.tell(job.how.verified)[0])))
    plan, nodes = job.plan, launcher.nodes
    warn_if_unwise(plan)
    words = spans_nodes(plan.mesh.groups("tp"), nodes.__getitem__, max(Counter(nodes).values()))
    if launcher.rank == 0 and plan.tp > 1 and words:
        report(f"{plan!r}: {words}")
    return job


def _facts_in_common(job: TrainJob) -> dict[str, Any]:
    """Return what every process has to ask for alike; otherwise replicas would begin with other weights, say."""
    weights = hashlib.sha256()
    for name, tensor in job.what.model.state_dict().items():
        if hasattr(tensor, "detach"):
            values = tensor.detach().cpu().contiguous()
            values = values.double() if values.is_floating_point() else values
            weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + values.numpy().tobytes())
    facts = {
        "plan": str(job.plan), "steps": job.how.steps, "seed": job.how.seed, "weights": weights.hexdigest(),
    }  # fmt: skip
    if len(job.what.batches):
        from mpkit.strategies.data.digest import data_digest

        facts["data"] = data_digest(*job.what.batches[0])
    return facts


class ProgressLine:
    """Follows a run in rank 0's terminal: one line, renewed each second, with the loss and the bubble.

    Reading the trace takes longer as it grows, so at most 2 % of the time is spent on that.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._every = LINE_EVERY[0 if self._live else 1]
        self._begun = time.monotonic()
        self._next = self._begun + self._every
        self._feed: LiveFeed | None = None

    def tick(self, run: Run) -> None:
        """Show how the run stands, if that is due."""
        now = time.monotonic()
        if now >= self._next:
            self._write(run, "" if self._live else "\n")
            self._next = time.monotonic() + max(self._every, 50 * (time.monotonic() - now))

    def output(self, line: str) -> None:
        """Show a line of mpkit's own."""
        print(f"{CLEAR if self._live else ''}{line}", file=sys.stderr)

    def end(self, run: Run) -> None:
        """Show how the run ended."""
        self._write(run, "\n" if run.proof.difference else f"; {run.proof}\n")

    def _write(self, run: Run, after: str) -> None:
        losses = list(run.losses)
        text = f"mpkit: {run.plan}: step {run.first_step + len(losses)} of {run.steps}"
        if losses:
            text += (
                f", loss {losses[-1]:.4g}, {seconds((time.monotonic() - self._begun) / len(losses))} per step"
            )
        self._feed = self._feed or run.feed()
        self._feed.advance()
        timeline = self._feed.timeline()
        if timeline.steps:
            text += f", bubble {percent(timeline.bubble_of(timeline.steps[-1]))}"
        if run.waiting_for:
            text += f"; {run.waiting_for}"
        sys.stderr.write(f"{CLEAR if self._live else ''}{text}{after}")
        sys.stderr.flush()

"""What a training under a launcher adds: what all processes must have in common, and a line in rank 0's terminal."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpkit.common.exceptions import report
from mpkit.common.units import percent, seconds
from mpkit.devices.placement_notes import spans_nodes
from mpkit.plan.plan import Plan

if TYPE_CHECKING:
    from mpkit.launch.launched_rank import LaunchedRank
    from mpkit.launch.session.run import Run
    from mpkit.launch.torchrun import Launcher
    from mpkit.strategies.prepare.prepare import TrainJob
    from mpkit.timeline.live_timeline import LiveFeed

__all__ = ["ProgressLine", "facts_in_common", "provable_here", "verified_alike", "warn_of_nodes"]

LINE_EVERY = 1.0, 30.0
"""Seconds between two lines: in a terminal, where each replaces the last one; elsewhere, as in a job's log."""

CLEAR = "\r\x1b[K"
"""Moves to the beginning of a terminal's line and empties it."""


def facts_in_common(job: TrainJob) -> dict[str, Any]:
    """Return what every process has to ask for alike; otherwise replicas would begin with other weights, say."""
    weights = hashlib.sha256()
    for name, tensor in job.what.model.state_dict().items():
        if hasattr(tensor, "detach"):
            weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            tensor = tensor.detach()
            weights.update(
                (tensor.double() if tensor.is_floating_point() else tensor)
                .cpu()
                .contiguous()
                .numpy()
                .tobytes()
            )
    facts = {
        "plan": str(job.plan),
        "steps": job.how.steps,
        "seed": job.how.seed,
        "weights": weights.hexdigest(),
    }
    if len(job.what.batches):
        from mpkit.strategies.data.digest import data_digest

        facts["data"] = data_digest(*job.what.batches[0])
    return facts


def verified_alike(job: TrainJob, launcher: Launcher) -> TrainJob:
    """Return the job with the verified steps of rank 0, where one of them is drawn."""
    steps = launcher.tell(job.how.verified)[0]
    return replace(job, how=replace(job.how, verified=tuple(steps)))


def provable_here(job: TrainJob, launch: LaunchedRank) -> TrainJob:
    """Return the job as it is if this process compares its steps, and otherwise without steps, and why."""
    return (
        job if launch.leads else job.without_proof("rank 0's process compares the steps, and has `run.proof`")
    )


def warn_of_nodes(plan: Plan, nodes: Sequence[str], rank: int) -> None:
    """Warn, with an `UnwisePlan` in rank 0's process, if tensor parallelism spans nodes.

    Args:
        plan: what is trained.
        nodes: the node of each rank.
        rank: this process's.
    """
    if rank or plan.tp == 1:
        return
    most = max(Counter(nodes).values())
    if words := spans_nodes(plan.mesh.groups("tp"), nodes.__getitem__, most):
        report(f"{plan!r}: {words}")


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

"""The record of what one stage computes: its FLOPs and bytes, and the activations that a forward saves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from mpkit.plan.schedule import Action
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.stage.stage import Stage, track
from mpkit.trace import Kind
from mpkit.trace.record.flops import Flops
from mpkit.trace.record.recorder import Recorder

__all__ = ["StageRecord"]

LETTERS = {
    Kind.FORWARD: "F",
    Kind.RECOMPUTE: "F",
    Kind.BACKWARD: "B",
    Kind.INPUT_GRAD: "I",
    Kind.WEIGHT_GRAD: "W",
}
"""The letters by which schedules name these computations."""


class StageRecord:
    """Records the computations of one stage.

    Args:
        recorder: the rank's recorder.
        job: read for the FLOPs of blocks.
        stage: the stage.
        flops: FLOPs and bytes of the stage's forward and backward, by the signature of a micro-batch.
    """

    def __init__(
        self, recorder: Recorder, job: TrainJob, stage: Stage, flops: Callable[[Hashable], Flops]
    ) -> None:
        self.recorder = recorder
        self._job, self._stage, self._count = job, stage, flops
        self._flops: dict[Hashable, Flops] = {}  # by signature

    def begin(self, kind: Kind, m: int, key: Hashable) -> int:
        """Record the beginning of a computation with its FLOPs and bytes, and return its number.

        Args:
            kind: forward, recomputation, backward, or one half of a backward.
            m: the micro-batch.
            key: its signature.
        """
        flops = self._flops.get(key)
        if flops is None:
            flops = self._flops[key] = self._count(key)
        done, nbytes = flops.cost_of(kind)
        if kind in (Kind.BACKWARD, Kind.INPUT_GRAD):  # including recomputed blocks
            for block in self._stage.recomputed:
                more = self.block_costs(key)(block.name)
                done, nbytes = done + more[0], nbytes + more[1]
        s = self._stage.number
        name = str(Action(LETTERS[kind], s, m))
        return self.recorder.begin(kind, name, stage=s, microbatch=m, flops=done, nbytes=nbytes)

    def end(self, op: int) -> None:
        """Record the end of a computation."""
        self.recorder.end(op)

    def track(self, made: Iterable[Tensor]) -> None:
        """Count what a computation has made as activations, for as long as it lives."""
        track(made, self.recorder)

    def count_saved(self) -> AbstractContextManager[Any]:
        """Return a context manager that counts what a forward saves for its backward."""
        return self.recorder.memory.saving()

    def block_costs(self, key: Hashable) -> Callable[[str], tuple[float, int]]:
        """Return a function that returns the FLOPs and bytes of a block's forward, by its name."""
        return lambda block: self._job.where.block_cost(key, self._stage.number, self._stage.names, block)

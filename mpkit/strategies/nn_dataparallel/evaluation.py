"""The forward of an evaluation under DP: scatter, replicate, forward, gather, and rank 0 computes the scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpkit.strategies.compute.scores import scores
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.nn_dataparallel.dp import DP
from mpkit.strategies.nn_dataparallel.gathered_loss import ShareForward, join_shares
from mpkit.strategies.nn_dataparallel.scatter_feed import ScatteredMicroBatch
from mpkit.strategies.stage.stage import onto_device
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["ScoredShares"]


class ScoredShares:
    """One rank's forwards of an evaluation under DP.

    Args:
        context: this rank's context.
        job: the job on the data for evaluation.
        dp: this rank of DP.
    """

    def __init__(self, context: Context, job: TrainJob, dp: DP) -> None:
        self._context, self._job, self._dp = context, job, dp
        self._forward = ShareForward(context, job, dp.stages[0])

    def scores(self, number: int, microbatches: list[MicroBatch]) -> Tensor | None:
        """Return the sums and weights of a batch's scores on rank 0; None on the others."""
        self._forward.begin_step(number, microbatches)
        size = self._job.what.batches.size(number)
        added = [self._microbatch(m, each, size) for m, each in enumerate(microbatches)]
        return None if added[0] is None else torch.stack([each for each in added if each is not None]).sum(0)

    def _microbatch(self, m: int, scattered: MicroBatch, size: int) -> Tensor | None:
        assert isinstance(scattered, ScatteredMicroBatch)
        record = self._context.record
        with self._dp.scatter_inputs(scattered) as (inputs, gather):
            outputs: tuple[Tensor, ...] = ()
            if scattered.rows[self._context.rank] > 0:
                op = record.begin(Kind.FORWARD, f"F{m}", stage=0, microbatch=m)
                outputs = self._forward(m, inputs)
                record.end(op)
            whole = gather(outputs)
        if self._context.rank != 0:
            return None
        targets = onto_device(
            join_shares([targets for _, targets in scattered.by_rank]), self._context.device, record
        )
        output = self._job.where.boundary(scattered.keys[0], 0).pack(whole)
        return torch.stack(scores(self._job, output, targets, scattered.whole, size))

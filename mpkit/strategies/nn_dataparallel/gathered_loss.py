"""What F computes under DP: each rank the outputs of its share, and rank 0 the loss of all shares and its gradients."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpkit.strategies.compute.stage_forward import StageForward, loss_share
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.nn_dataparallel.scatter_feed import ScatteredMicroBatch
from mpkit.strategies.stage.stage import Stage, onto_device, track
from mpkit.trace import Kind
from mpkit.trace.record.flops import Flops

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["ShareForward", "gathered_loss", "join_shares"]


class ShareForward(StageForward):
    """The forward of the whole model without its loss, for one rank's share of a micro-batch."""

    def __init__(self, context: Context, job: TrainJob, stage: Stage) -> None:
        super().__init__(context, job, stage)
        self.computes_loss = False  # rank 0 gathers the outputs

    def flops(self, key: Hashable) -> Flops:
        """Return FLOPs and bytes of the layers' forward and backward, for shares of this signature."""
        return self._job.where.flops(key, self._s, loss=False)

    def _refusal(self, m: int, made: str, expected: str) -> str:
        return (
            f"the model made {made}, and {expected} of inputs of the same shape before: DP gathers outputs, whose "
            "shapes may depend on the shapes of the data, and not on its values. Plan.ddp gathers none."
        )


def gathered_loss(
    context: Context,
    job: TrainJob,
    m: int,
    scattered: ScatteredMicroBatch,
    outputs: tuple[Tensor, ...],
    scale: float,
) -> tuple[list[float], tuple[Tensor | None, ...]]:
    """Compute a micro-batch's share of the loss forward and backward, both recorded.

    Args:
        context: rank 0's context.
        job: read for the loss.
        m: the micro-batch.
        scattered: every rank's share of it.
        outputs: the outputs of all shares, (samples, ...) each.
        scale: gradient of the loss.

    Returns:
        The share of the loss, with its count if it has one; and the gradient of each output, None where it has none.
    """
    record = context.record
    targets = onto_device(join_shares([targets for _, targets in scattered.by_rank]), context.device, record)
    flops = [
        job.where.numbers[key][-1].flops
        for key, rows in zip(scattered.keys, scattered.rows, strict=True)
        if rows
    ]
    boundary = job.where.boundary(scattered.keys[0], 0)
    ends = tuple(
        output.requires_grad_(spec.requires_grad)
        for output, spec in zip(outputs, boundary.specs, strict=True)
    )
    # ---- forward
    op = record.begin(
        Kind.FORWARD, "loss", microbatch=m,
        flops=sum(f.forward for f in flops), nbytes=sum(f.forward_bytes for f in flops),
    )  # fmt: skip
    with record.memory.saving():
        loss, *count = loss_share(job, boundary.pack(ends), targets, scattered.whole)
    record.end(op)
    # ---- backward
    op = record.begin(
        Kind.BACKWARD, "loss", microbatch=m,
        flops=sum(f.backward for f in flops), nbytes=sum(f.backward_bytes for f in flops),
    )  # fmt: skip
    torch.autograd.backward([loss], [torch.full_like(loss, scale)])
    gradients = tuple(end.grad for end in ends)
    track((gradient for gradient in gradients if gradient is not None), record)
    record.end(op)
    return [loss.item(), *(each.item() for each in count)], gradients


def join_shares(values: list[Value]) -> Value:
    """Concatenate the shares."""
    parts = [iter(leaves(value)) for value in values]
    return map_tensors(lambda _: torch.cat([next(part) for part in parts]), values[0])

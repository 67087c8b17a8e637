"""The compute of a DP rank: forward and backward of its share, and on rank 0 the loss of all shares together."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpkit.data.microbatch import Value, leaves, map_tensors
from mpkit.loss.quotient import shares
from mpkit.models.randomness import Randomness
from mpkit.parallel.job.job import TrainJob
from mpkit.parallel.nn_dataparallel.scatter_feed import ScatteredMicroBatch
from mpkit.parallel.partition.boundary import Boundary, LayerNumbers
from mpkit.parallel.stage.block_recompute import Around
from mpkit.parallel.stage.selective_recompute import AttentionAgain
from mpkit.parallel.stage.stage import Stage, cast
from mpkit.parallel.stage.to_device import onto_device, track
from mpkit.record.saved import Saved, saving
from mpkit.schedule import Action
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.launch.process.context import Context

__all__ = ["Kept", "ShareWork"]


@dataclass
class Kept:
    """What a forward keeps for its backward."""

    inputs: Value
    outputs: tuple[Tensor, ...]
    saved: Saved


class ShareWork:
    """One rank's compute, recorded.

    Args:
        context: this rank's context.
        job: what to train, and how.
        stage: the whole model.

    Attributes:
        step: number of the current step.
    """

    def __init__(self, context: Context, job: TrainJob, stage: Stage) -> None:
        self._record, self._device = context.record, context.device
        self._job, self._stage = job, stage
        self._recompute = job.plan.recompute == "full" and not stage.blocks
        self._inside = AttentionAgain if job.plan.recompute == "selective" else nullcontext
        self._randomness = Randomness(job.how.seed, job.plan.mesh.place(context.rank).dp, context.device)
        self.step = -1

    def forward(self, m: int, key: Hashable, inputs: Value) -> Kept:
        """Return the outputs of this rank's share."""
        op = self._begin(Kind.FORWARD, Action("F", 0, m), self._numbers(key))
        with (
            torch.set_grad_enabled(not self._recompute),
            saving(self._record, 0, key, every=bool(self._stage.recomputed)) as saved,
            self._inside(),
            self._stage.recomputing(Around(self._record, costs=partial(self._cost, key))),
        ):
            outputs = self._outputs(m, key, inputs)
        track(outputs, self._record)
        self._record.end(op)
        return Kept(inputs, outputs, saved)

    def _outputs(self, m: int, key: Hashable, inputs: Value) -> tuple[Tensor, ...]:
        draws = self._randomness.draws(self.step, m)
        with draws.apart():
            output = self._stage(inputs, draws)
        expected, made = self._job.where.boundary(key, 0), Boundary.of(output)
        if made is None or made.shapes != expected.shapes:
            raise ValueError(
                f"the model made {made or type(output).__name__}, and {expected} of inputs of the same shape before: "
                "DP gathers outputs, whose shapes may depend on the shapes of the data, and not on its values. "
                "Plan.ddp gathers none."
            )
        return (output,) if isinstance(output, Tensor) else output

    def loss(
        self, m: int, dealt: ScatteredMicroBatch, outputs: tuple[Tensor, ...], wants: list[bool], scale: float
    ) -> tuple[list[float], tuple[Tensor | None, ...]]:
        """Return the micro-batch's share of the loss (`shares`) for all outputs, and the gradient of each output."""
        job, record = self._job, self._record
        targets = self.to_device(_joined([targets for _, targets in dealt.dealt]))
        numbers = [
            job.where.numbers[key][-1] for key, rows in zip(dealt.keys, dealt.rows, strict=True) if rows
        ]
        ends = tuple(t.requires_grad_(wanted) for t, wanted in zip(outputs, wants, strict=True))
        op = self._begin(Kind.FORWARD, "loss", numbers, m)
        with saving(record, -1, tuple(dealt.keys)) as saved:
            output = job.where.boundary(dealt.keys[0], 0).pack(ends)
            if job.plan.precision != "full":
                output = cast(output, torch.float32)  # a loss is a long sum, for which 16 bits are too few
            loss, *count = shares(job.what.loss(output, targets), dealt.whole, job.what.nominal)
        record.end(op)
        op = self._begin(Kind.BACKWARD, "loss", numbers, m)
        torch.autograd.backward([loss], [torch.full_like(loss, scale)])
        saved.release()
        gradients = tuple(end.grad for end in ends)
        track(tuple(gradient for gradient in gradients if gradient is not None), self._record)
        record.end(op)
        return [loss.item(), *(each.item() for each in count)], gradients

    def backward(
        self, m: int, key: Hashable, kept: Kept, wanted: list[int], gradients: tuple[Tensor, ...]
    ) -> None:
        """Compute the parameters' gradients from those of this rank's wanted outputs; the others have none."""
        numbers = self._numbers(key)
        if self._recompute:
            op = self._begin(Kind.RECOMPUTE, Action("F", 0, m), numbers)
            with self._stage.spare_buffers(), saving(self._record, 0, key) as kept.saved:
                kept.outputs = self._outputs(m, key, kept.inputs)
            self._record.end(op)
        op = self._begin(Kind.BACKWARD, Action("B", 0, m), numbers)
        if wanted:
            torch.autograd.backward([kept.outputs[i] for i in wanted], list(gradients))
        kept.saved.release()
        self._record.end(op)

    def _cost(self, key: Hashable, block: str) -> tuple[float, int]:
        return self._job.where.block_cost(key, 0, self._stage.names, block)

    # ---- record and device --------------------------------------------------------------------------------

    def _numbers(self, key: Hashable) -> list[LayerNumbers]:
        """Return the numbers of the layers, without the loss."""
        return self._job.where.numbers[key][:-1]

    def _begin(self, kind: Kind, what: Action | str, numbers: list[LayerNumbers], m: int = -1) -> int:
        """Record the beginning of a computation, with its FLOPs and bytes."""
        flops = [layer.flops for layer in numbers]
        back = kind == Kind.BACKWARD
        done = sum(f.backward if back else f.forward for f in flops)
        moved = sum(f.backward_bytes if back else f.forward_bytes for f in flops)
        stage, m = (what.stage, what.microbatch) if isinstance(what, Action) else (-1, m)
        return self._record.begin(kind, str(what), stage=stage, microbatch=m, flops=done, nbytes=moved)

    def to_device(self, value: Value) -> Value:
        """Return a copy on the device."""
        return onto_device(value, self._device, self._record)


def _joined(values: list[Value]) -> Value:
    """Concatenate the shares."""
    parts = [iter(leaves(value)) for value in values]
    return map_tensors(lambda _: torch.cat([next(part) for part in parts]), values[0])

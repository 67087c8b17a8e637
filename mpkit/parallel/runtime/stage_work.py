"""What one stage does for a micro-batch, recorded: its forward, and its backward, whole or in two halves.

    forward        F   the stage's outputs, or the micro-batch's share of the loss
    recompute          the forward again, where it kept only its inputs
    backward       B   gradients of the weights, and of the inputs
    input_grads    I   gradients of the inputs alone
    weight_grads   W   gradients of the weights alone

What a forward leaves for its backward is kept here, by micro-batch, and released as soon as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpkit.comm.process_group import ProcessGroup
from mpkit.data.microbatch import Value, leaves
from mpkit.loss.quotient import shares
from mpkit.loss.whole_batch import WholeBatchLoss
from mpkit.models.randomness import Draws, Randomness
from mpkit.parallel.job.feed import MicroBatch
from mpkit.parallel.job.job import TrainJob
from mpkit.parallel.partition.boundary import Boundary
from mpkit.parallel.runtime.local_model import attention_over
from mpkit.parallel.stage.block_recompute import Around
from mpkit.parallel.stage.gradient_sync import GradientSync
from mpkit.parallel.stage.selective_recompute import AttentionAgain
from mpkit.parallel.stage.split_backward import WeightGrads, input_grads
from mpkit.parallel.stage.stage import PRECISIONS, Stage, cast
from mpkit.parallel.stage.to_device import onto_device, track
from mpkit.record.flops import Flops
from mpkit.record.saved import Saved, saving
from mpkit.schedule import Action
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.launch.process.context import Context

__all__ = ["StageWork"]


@dataclass
class Kept:
    """What a forward leaves for its backward.

    Attributes:
        inputs: the stage's inputs, which are leaves.
        outputs: the stage's outputs; empty if they are recomputed.
        saved: what autograd saved.
        weight_grads: what I leaves for W.
        of_blocks: the same for blocks that were recomputed in I.
    """

    inputs: Value
    outputs: tuple[Tensor, ...] = ()
    saved: Saved = field(default_factory=Saved)
    weight_grads: WeightGrads | None = None
    of_blocks: list[WeightGrads] | None = None


class StageWork:
    """One stage's compute, step after step.

    Args:
        context: this rank's context.
        job: what to train, and how.
        stage: the stage's layers.
        sync: synchronizes gradients with the replicas.
        cp: the ranks that share the sequences.
        split: micro-batches whose backward is split into I and W.
    """

    def __init__(
        self,
        context: Context,
        job: TrainJob,
        stage: Stage,
        sync: GradientSync,
        cp: ProcessGroup,
        split: Collection[int] = (),
    ) -> None:
        self._record, self._device = context.record, context.device
        self._job, self._stage, self._s = job, stage, stage.number
        self._sync = sync
        self._last = stage.number == len(job.where.stages) - 1
        self._split = frozenset(split)
        self._dtype = PRECISIONS.get(job.plan.precision)
        self._recompute = job.plan.recompute == "full" and not stage.blocks  # the stage as a whole
        self._inside = AttentionAgain if job.plan.recompute == "selective" else nullcontext
        self._randomness = Randomness(job.how.seed, job.plan.mesh.replica(context.rank), context.device)
        self._attention = attention_over(job.plan, cp)
        self._kept: dict[int, Kept] = {}  # by micro-batch
        self._flops: dict[Hashable, Flops] = {}  # by signature
        self._step = -1
        self._microbatches: list[MicroBatch] = []
        self._loss_scale = 1.0

    def begin_step(self, number: int, microbatches: list[MicroBatch], loss_scale: float) -> None:
        """Set the step, micro-batches and loss scale of the next actions."""
        self._step, self._microbatches, self._loss_scale = number, microbatches, loss_scale

    # ---- F ------------------------------------------------------------------------------------------------

    def data(self, m: int) -> Value:
        """Return the model's inputs, on the device."""
        inputs = onto_device(self._microbatches[m].inputs, self._device, self._record)
        return inputs if self._dtype is None else cast(inputs, self._dtype)

    def forward(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """Return the stage's outputs for its inputs; at the last stage, the micro-batch's share of the loss (`shares`).

        Args:
            inputs: leaves; those whose gradient is wanted require one.
        """
        op = self._begin(Kind.FORWARD, "F", m)
        kept = self._kept[m] = Kept(inputs)
        if self._recompute:
            with torch.no_grad():
                outputs = self._compute(m, inputs)
        else:
            kept.of_blocks = [] if m in self._split else None
            around = Around(self._record, self._attention, self._costs(m), kept.of_blocks)
            with self._saving(m) as kept.saved, self._inside(), self._stage.recomputing(around):
                outputs = kept.outputs = self._compute(m, inputs)
        track(outputs, self._record)
        self._record.end(op)
        return outputs

    def recompute(self, m: int) -> None:
        """Recompute what the forward did not keep, if the plan says so; no gradient of the outputs is needed."""
        if not self._recompute:
            return
        kept = self._kept[m]
        op = self._begin(Kind.RECOMPUTE, "F", m)
        with self._stage.spare_buffers(), self._saving(m) as kept.saved:
            kept.outputs = self._compute(m, kept.inputs)
        track(kept.outputs, self._record)
        self._record.end(op)

    def _compute(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        microbatch, s = self._microbatches[m], self._s
        draws = self._randomness.draws(self._step, m)
        with draws.apart(), self._attention():
            output = self._stage(inputs, draws)
            if self._last:
                return self._loss_of(output, m, draws)
        expected, made = self._job.where.boundary(microbatch.key, s), Boundary.of(output)
        if made is None or made.shapes != expected.shapes:
            raise ValueError(
                f"stage {s} made {made or type(output).__name__} of micro-batch {m}, and {expected} of one of the "
                "same shape before: the shapes that go from stage to stage may depend on the shapes of the data, "
                "and not on its values. Plan.serial() has no stages to go between."
            )
        return (output,) if isinstance(output, Tensor) else output

    def _loss_of(self, output: Any, m: int, draws: Draws) -> tuple[Tensor, ...]:
        """Return the micro-batch's share of the loss, and its count where the loss has one."""
        microbatch = self._microbatches[m]
        if self._dtype is not None:
            output = cast(output, torch.float32)  # a loss is a long sum, for which 16 bits are too few
        draws.begin("the loss")
        targets = onto_device(microbatch.targets, self._device, self._record)
        if isinstance(self._job.what.loss, WholeBatchLoss):
            loss = self._job.what.loss(output, targets, counts=microbatch.weight > 0)
        else:
            loss = self._job.what.loss(output, targets)
        return shares(loss, microbatch.weight, self._job.what.nominal)

    # ---- B ------------------------------------------------------------------------------------------------

    def backward(self, m: int, gradients: tuple[Tensor, ...] | None, last: bool) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs; the gradients of the weights are added to their `.grad`.

        Args:
            m: the micro-batch.
            gradients: those of the outputs that require one; None at the last stage, whose loss has a gradient of 1.
            last: whether this is the stage's last backward in the step.

        Returns:
            The gradient of each input that requires one.
        """
        kept = self._kept.pop(m)
        op = self._begin(Kind.BACKWARD, "B", m)
        outputs, gradients = self._wanted(m, kept, gradients)
        with self._sync.backward(self._s, last):
            if outputs:
                torch.autograd.backward(outputs, gradients)
            kept.saved.release()
        self._record.end(op)
        return self._of_inputs(kept, [tensor.grad for tensor in _wanting(kept.inputs)])

    # ---- I and W ------------------------------------------------------------------------------------------

    def input_grads(self, m: int, gradients: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Run the backward's first half: like `backward`, but without gradients of the weights."""
        kept = self._kept[m]
        op = self._begin(Kind.INPUT_GRAD, "I", m)
        outputs, gradients = self._wanted(m, kept, gradients)
        with self._sync.backward(self._s, last=False, half="I"):
            found, kept.weight_grads = input_grads(outputs, gradients, _wanting(kept.inputs))
            of_inputs = self._of_inputs(kept, found)
            # What W needs is in `weight_grads`.
            kept.inputs = kept.outputs = ()
            del outputs, gradients
            kept.saved.halve()
            track(kept.weight_grads.held(), self._record)
        self._record.end(op)
        return of_inputs

    def weight_grads(self, m: int, last: bool) -> None:
        """Run the second half: compute the gradients of the weights, and add them to their `.grad`."""
        kept = self._kept.pop(m)
        assert kept.weight_grads is not None, "a valid schedule has I before W"
        op = self._begin(Kind.WEIGHT_GRAD, "W", m)
        with self._sync.backward(self._s, last, half="W"):
            kept.weight_grads.run()
            while kept.of_blocks:
                kept.of_blocks.pop(0).run()
            kept.saved.release()
        self._record.end(op)

    def _wanted(
        self, m: int, kept: Kept, gradients: tuple[Tensor, ...] | None
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the outputs that need a gradient, as the dry run found them, and those gradients.

        The outputs of a recomputed block do not say which of them need one.
        """
        if gradients is None:
            outputs = [loss for loss in kept.outputs if loss.requires_grad]
            return outputs, tuple(torch.full_like(loss, self._loss_scale) for loss in outputs)
        routes = self._job.where.leaving(self._microbatches[m].key, self._s)
        wanting = {
            i
            for route in routes
            for i, spec in zip(route.which, route.specs, strict=True)
            if spec.requires_grad
        }
        return [kept.outputs[i] for i in sorted(wanting)], gradients

    def _of_inputs(self, kept: Kept, found: list[Tensor | None]) -> tuple[Tensor, ...]:
        pairs = zip(_wanting(kept.inputs), found, strict=True)
        gradients = tuple(torch.zeros_like(tensor) if grad is None else grad for tensor, grad in pairs)
        track(gradients, self._record)
        return gradients

    # ---- record and device --------------------------------------------------------------------------------

    def _saving(self, m: int) -> Saved:
        """Count what a forward saves; a split backward releases it in another order than a whole one."""
        key = self._microbatches[m].key, m in self._split
        # What recomputed blocks save is released within a backward, so no count can be reused.
        return saving(self._record, self._s, key, every=bool(self._stage.recomputed))

    def _costs(self, m: int) -> Callable[[str], tuple[float, int]]:
        """Return a function that returns the FLOPs and bytes of a block's forward, by its name."""
        key = self._microbatches[m].key
        return lambda block: self._job.where.block_cost(key, self._s, self._stage.names, block)

    def _begin(self, kind: Kind, letter: str, m: int) -> int:
        """Record the beginning of a computation, with its FLOPs and bytes."""
        key = self._microbatches[m].key
        flops = self._flops.get(key)
        if flops is None:
            flops = self._flops[key] = self._job.where.flops(key, self._s)
        done, nbytes = flops.of(kind)
        if kind in (Kind.BACKWARD, Kind.INPUT_GRAD):  # including recomputed blocks
            for block in self._stage.recomputed:
                more = self._costs(m)(block.name)
                done, nbytes = done + more[0], nbytes + more[1]
        name = str(Action(letter, self._s, m))
        return self._record.begin(kind, name, stage=self._s, microbatch=m, flops=done, nbytes=nbytes)


def _wanting(inputs: Value) -> list[Tensor]:
    return [tensor for tensor in leaves(inputs) if tensor.requires_grad]

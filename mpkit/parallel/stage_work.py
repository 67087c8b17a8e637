"""What one stage does for a micro-batch, recorded: its forward, and its backward, whole or in two halves.

    forward        F   the stage's outputs, or the micro-batch's share of the loss
    recompute          the forward again, where it kept its inputs only
    backward       B   gradients of the weights, and of the inputs
    input_grads    I   gradients of the inputs alone
    weight_grads   W   those of the weights

What a forward leaves for its backward is kept here, by micro-batch, and let go of as soon as it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpkit.loss.quotient import shares
from mpkit.loss.whole_batch import WholeBatchLoss
from mpkit.parallel.axis import Line
from mpkit.parallel.block_recompute import Around
from mpkit.parallel.feed import MicroBatch
from mpkit.parallel.job import Boundary, TrainJob
from mpkit.parallel.local_model import attention_over
from mpkit.parallel.microbatch import Value, leaves
from mpkit.parallel.onto import onto_device, track
from mpkit.parallel.randomness import Draws, Randomness
from mpkit.parallel.replica import Replica
from mpkit.parallel.selective import AttentionAgain
from mpkit.parallel.split_backward import WeightGrads, input_grads
from mpkit.parallel.stage import PRECISIONS, Stage, cast
from mpkit.record.flops import Flops
from mpkit.record.saved import Saved, saving
from mpkit.schedule import Action
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.launch.context import Context

__all__ = ["StageWork"]


@dataclass
class Kept:
    """What a forward leaves for its backward.

    Attributes:
        inputs: the stage's, leaves.
        outputs: empty if they are recomputed.
        saved: what autograd saved.
        weight_grads: what I leaves for W.
        of_blocks: likewise, of blocks that were recomputed in I.
    """

    inputs: Value
    outputs: tuple[Tensor, ...] = ()
    saved: Saved = field(default_factory=Saved)
    weight_grads: WeightGrads | None = None
    of_blocks: list[WeightGrads] | None = None


class StageWork:
    """One stage's compute, step after step.

    Args:
        context: of this rank.
        job: what to train, and how.
        stage: the layers.
        replica: told when a backward that makes gradients of weights is over.
        cp: who shares the sequences.
        split: the micro-batches whose backward is I and W.
    """

    def __init__(
        self,
        context: Context,
        job: TrainJob,
        stage: Stage,
        replica: Replica,
        cp: Line,
        split: Collection[int] = (),
    ) -> None:
        self._record, self._device = context.record, context.device
        self._job, self._stage, self._s = job, stage, stage.number
        self._replica = replica
        self._last = stage.number == len(job.stages) - 1
        self._split = frozenset(split)
        self._dtype = PRECISIONS.get(job.plan.precision)
        self._recompute = job.plan.recompute == "full" and not stage.blocks  # the stage as a whole
        self._inside = AttentionAgain if job.plan.recompute == "selective" else nullcontext
        self._randomness = Randomness(job.seed, job.plan.mesh.replica(context.rank), context.device)
        self._attention = attention_over(job.plan, cp)
        self._kept: dict[int, Kept] = {}  # by micro-batch
        self._flops: dict[Hashable, Flops] = {}  # by signature
        self._step = -1
        self._microbatches: list[MicroBatch] = []
        self._loss_scale = 1.0

    def begin_step(self, number: int, microbatches: list[MicroBatch], loss_scale: float) -> None:
        """What the next actions are about."""
        self._step, self._microbatches, self._loss_scale = number, microbatches, loss_scale

    # ---- F ------------------------------------------------------------------------------------------------

    def data(self, m: int) -> Value:
        """The model's inputs, on the device."""
        inputs = onto_device(self._microbatches[m].inputs, self._device, self._record)
        return inputs if self._dtype is None else cast(inputs, self._dtype)

    def forward(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """The stage's outputs for its inputs; at the last stage, the micro-batch's share of the loss (`shares`).

        Args:
            inputs: leaves; what is wanted a gradient of requires one.
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
        """Compute again what the forward did not keep, if the plan says so; needs no gradient of the outputs."""
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
        expected, made = self._job.boundary(microbatch.key, s), Boundary.of(output)
        if made is None or made.shapes != expected.shapes:
            raise ValueError(
                f"stage {s} made {made or type(output).__name__} of micro-batch {m}, and {expected} of one of the "
                "same shape before: the shapes that go from stage to stage may depend on the shapes of the data, "
                "and not on its values. Plan.serial() has no stages to go between."
            )
        return (output,) if isinstance(output, Tensor) else output

    def _loss_of(self, output: Any, m: int, draws: Draws) -> tuple[Tensor, ...]:
        """The micro-batch's share of the loss, and its count where the loss has one."""
        microbatch = self._microbatches[m]
        if self._dtype is not None:
            output = cast(output, torch.float32)  # a loss sums much, which 16 bits are too few for
        draws.begin("the loss")
        targets = onto_device(microbatch.targets, self._device, self._record)
        if isinstance(self._job.loss, WholeBatchLoss):
            loss = self._job.loss(output, targets, counts=microbatch.weight > 0)
        else:
            loss = self._job.loss(output, targets)
        return shares(loss, microbatch.weight, self._job.nominal)

    # ---- B ------------------------------------------------------------------------------------------------

    def backward(self, m: int, gradients: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Gradients of the weights, added to theirs, and of the inputs.

        Args:
            gradients: of those outputs that require one; None at the last stage: that of the loss is 1.

        Returns:
            the gradient of each input that requires one.
        """
        kept = self._kept.pop(m)
        op = self._begin(Kind.BACKWARD, "B", m)
        outputs, gradients = self._wanted(m, kept, gradients)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        kept.saved.release()
        self._replica.after_backward()
        self._record.end(op)
        return self._of_inputs(kept, [tensor.grad for tensor in _wanting(kept.inputs)])

    # ---- I and W ------------------------------------------------------------------------------------------

    def input_grads(self, m: int, gradients: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """The backward's first half: as `backward`, but for the weights."""
        kept = self._kept[m]
        op = self._begin(Kind.INPUT_GRAD, "I", m)
        outputs, gradients = self._wanted(m, kept, gradients)
        found, kept.weight_grads = input_grads(outputs, gradients, _wanting(kept.inputs))
        of_inputs = self._of_inputs(kept, found)
        # What W needs is in `weight_grads`.
        kept.inputs = kept.outputs = ()
        del outputs, gradients
        kept.saved.halve()
        track(kept.weight_grads.held(), self._record)
        self._replica.after_input_grads()
        self._record.end(op)
        return of_inputs

    def weight_grads(self, m: int) -> None:
        """The second half: gradients of the weights, added to theirs."""
        kept = self._kept.pop(m)
        assert kept.weight_grads is not None, "a valid schedule has I before W"
        op = self._begin(Kind.WEIGHT_GRAD, "W", m)
        kept.weight_grads.run()
        while kept.of_blocks:
            kept.of_blocks.pop(0).run()
        kept.saved.release()
        self._replica.after_backward()
        self._record.end(op)

    def _wanted(
        self, m: int, kept: Kept, gradients: tuple[Tensor, ...] | None
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the outputs that want a gradient, as the dry run found them, and those gradients.

        A block that is recomputed makes outputs of which each might want one.
        """
        if gradients is None:
            outputs = [loss for loss in kept.outputs if loss.requires_grad]
            return outputs, tuple(torch.full_like(loss, self._loss_scale) for loss in outputs)
        routes = self._job.leaving(self._microbatches[m].key, self._s)
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
        """Count what a forward saves; a backward in halves lets go of it otherwise than a whole one."""
        key = self._microbatches[m].key, m in self._split
        # What recomputed blocks hold comes and goes within a backward: nothing to be reused.
        return saving(self._record, self._s, key, every=bool(self._stage.recomputed))

    def _costs(self, m: int) -> Callable[[str], tuple[float, int]]:
        """FLOPs and bytes of a block's forward, by its name."""
        key = self._microbatches[m].key
        return lambda block: self._job.block_cost(key, self._s, self._stage.names, block)

    def _begin(self, kind: Kind, letter: str, m: int) -> int:
        """Record that compute begins, with its FLOPs and bytes."""
        key = self._microbatches[m].key
        flops = self._flops.get(key)
        if flops is None:
            flops = self._flops[key] = self._job.flops(key, self._s)
        done, nbytes = flops.of(kind)
        if kind in (Kind.BACKWARD, Kind.INPUT_GRAD):  # blocks are recomputed within
            for block in self._stage.recomputed:
                more = self._costs(m)(block.name)
                done, nbytes = done + more[0], nbytes + more[1]
        name = str(Action(letter, self._s, m))
        return self._record.begin(kind, name, stage=self._s, microbatch=m, flops=done, nbytes=nbytes)


def _wanting(inputs: Value) -> list[Tensor]:
    return [tensor for tensor in leaves(inputs) if tensor.requires_grad]

"""What one stage does for a micro-batch, recorded: its forward, and its backward, whole or in two halves.

    forward        F   the stage's outputs, or the micro-batch's share of the loss
    recompute          the forward again, where it kept only its inputs
    backward       B   gradients of the weights, and of the inputs
    input_grads    I   gradients of the inputs alone
    weight_grads   W   gradients of the weights alone

What a forward keeps for its backward (`KeptForward`) is held here, by micro-batch, and released as soon as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mpkit.plan.schedule import Action
from mpkit.strategies.compute.stage_forward import StageForward
from mpkit.strategies.data.microbatch import Value, leaves
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.heard_draws import ForwardDraws, HeardDraws
from mpkit.strategies.models.step_facts import StepFacts
from mpkit.strategies.stage.gradient_sync import GradientSync
from mpkit.strategies.stage.recompute import AttentionAgain, RecomputedCall, RecomputeScope, WrittenState
from mpkit.strategies.stage.split_backward import WeightGrads, input_grads
from mpkit.strategies.stage.stage import Stage, track
from mpkit.trace import Kind
from mpkit.trace.record.flops import Flops

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


@dataclass
class KeptForward:
    """What the forward of one micro-batch keeps.

    Attributes:
        inputs: the stage's inputs, which are leaves.
        outputs: the stage's outputs; of a stage that is recomputed as a whole, the edges of its graph.
        call: the call of a stage that is recomputed as a whole.
        weight_grads: what I leaves for W.
    """

    inputs: Value
    outputs: tuple[Any, ...] = ()
    call: RecomputedCall | None = None
    weight_grads: WeightGrads | None = None

    @property
    def differentiable(self) -> list[Tensor]:
        """The inputs that require a gradient."""
        return [tensor for tensor in leaves(self.inputs) if tensor.requires_grad]

    def roots(
        self, gradients: dict[int, Tensor] | None, loss_scale: float
    ) -> tuple[list[Any], tuple[Tensor, ...]]:
        """Return the outputs from which the backward starts, and their gradients.

        Args:
            gradients: gradients of the outputs, by the output's number; None if the outputs are a share of the loss.
            loss_scale: gradient of the loss.
        """
        if gradients is None:
            losses = [loss for loss in self.outputs if loss.requires_grad]
            return losses, tuple(torch.full_like(loss, loss_scale) for loss in losses)
        return [self.outputs[i] for i in gradients], tuple(gradients.values())


LETTERS = {
    Kind.FORWARD: "F",
    Kind.RECOMPUTE: "F",
    Kind.BACKWARD: "B",
    Kind.INPUT_GRAD: "I",
    Kind.WEIGHT_GRAD: "W",
}
"""The letters by which schedules name these computations."""


class StageWork:
    """One stage's forwards and backwards, step after step."""

    def __init__(
        self, context: Context, job: TrainJob, stage: Stage, compute: StageForward, sync: GradientSync
    ) -> None:
        self._stage, self._compute, self._sync = stage, compute, sync
        self._record, self._job = context.record, job
        self._flops: dict[Hashable, Flops] = {}  # by signature
        self._recompute = job.plan.recompute == "full" and not stage.blocks  # the stage as a whole
        self._state = WrittenState(stage.layers)
        self._selective = job.plan.recompute == "selective"
        self._kept: dict[int, KeptForward] = {}  # by micro-batch
        self._microbatches: list[MicroBatch] = []
        self._loss_scale = 1.0
        self._heard: ForwardDraws | None = None
        self._facts: StepFacts | None = None
        # Compiled code cannot be listened to.
        self._compiled = any(type(each).__name__ == "OptimizedModule" for each in stage.layers.modules())

    def begin_step(self, number: int, microbatches: list[MicroBatch], loss_scale: float) -> None:
        """Set the step, micro-batches and loss scale of the next actions."""
        self._compute.begin_step(number, microbatches)
        self._microbatches, self._loss_scale = microbatches, loss_scale

    def listen(self, heard: ForwardDraws | None) -> None:
        """Note what forwards draw at random from now on; None: no longer."""
        self._heard = heard
        self._compute.others = None if heard is None else heard.others

    def watch(self, facts: StepFacts) -> None:
        """Note from now on what forwards and the loss do."""
        if not self._compiled:
            self._facts = self._compute.facts = facts

    def _key(self, m: int) -> Hashable:
        """Return the signature of a micro-batch."""
        return self._microbatches[m].key

    def _begin(self, kind: Kind, m: int) -> int:
        """Record the beginning of a computation with its FLOPs and bytes, and return its number."""
        key = self._key(m)
        flops = self._flops.get(key)
        if flops is None:
            flops = self._flops[key] = self._compute.flops(key)
        done, nbytes = flops.cost_of(kind)
        if kind in (Kind.BACKWARD, Kind.INPUT_GRAD):  # including what is recomputed
            if self._job.plan.recompute == "selective":
                done, nbytes = done + flops.attention[0], nbytes + flops.attention[1]
            for block in self._stage.recomputed:
                more = self._block_costs(key)(block.name)
                done, nbytes = done + more[0], nbytes + more[1]
        s = self._stage.number
        name = str(Action(LETTERS[kind], s, m))
        return self._record.begin(kind, name, stage=s, microbatch=m, flops=done, nbytes=nbytes)

    def _block_costs(self, key: Hashable) -> Callable[[str], tuple[float, int]]:
        """Return a function that returns the FLOPs and bytes of a block's forward, by its name."""
        return lambda block: self._job.where.block_cost(key, self._stage.number, self._stage.names, block)

    # ---- F ------------------------------------------------------------------------------------------------

    def forward(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """Return what the stage's forward computes from its inputs (`StageForward`)."""
        op = self._begin(Kind.FORWARD, m)
        if self._compute.evaluates:  # nothing is kept, for no backward
            outputs = self._compute(m, inputs)
            track(outputs, self._record)
            self._record.end(op)
            return outputs
        kept = self._kept[m] = KeptForward(inputs)
        if self._recompute:
            kept.call = RecomputedCall(
                partial(self._compute, m, inputs),
                self._record,
                again=partial(self._again, m, inputs),
                state=self._state,
            )
            with self._hear_draws(m), self._hear_facts(m):
                outputs = kept.call()
            edges = (get_gradient_edge(each) if each.requires_grad else each for each in outputs)
            kept.outputs = outputs if self._compute.computes_loss else tuple(edges)  # without their content
        else:
            scope = RecomputeScope(
                self._record,
                self._compute.attention,
                self._block_costs(self._key(m)),
                self._stage.sharded.draws,
            )
            with (
                self._record.memory.saving(),
                AttentionAgain(self._record) if self._selective else nullcontext(),
                self._stage.recompute_blocks(scope),
                self._hear_draws(m),
                self._hear_facts(m),
            ):
                outputs = kept.outputs = self._compute(m, inputs)
        track(outputs, self._record)
        self._record.end(op)
        return outputs

    def _hear_draws(self, m: int) -> AbstractContextManager[Any]:
        """Return a context in which the random draws of a micro-batch's forward are heard, if somebody listens."""
        if self._heard is None or self._compiled:
            return nullcontext()
        return HeardDraws(self._heard.draws.setdefault((self._stage.number, m), []), self._heard)

    def _hear_facts(self, m: int) -> AbstractContextManager[Any]:
        """Return a context in which it is noted what a micro-batch's forward does."""
        data = leaves(self._microbatches[m].inputs)
        return nullcontext() if self._facts is None else self._facts.of_forward(len(data[0]) if data else 0)

    # ---- recompute ----------------------------------------------------------------------------------------

    def recompute(self, m: int) -> None:
        """Recompute what the forward did not keep, if the plan says so; no gradient of the outputs is needed."""
        if self._recompute:
            call = self._kept[m].call
            assert call is not None
            call.again()

    def _again(self, m: int, inputs: Value) -> None:
        op = self._begin(Kind.RECOMPUTE, m)
        self._compute(m, inputs)
        self._record.end(op)

    # ---- B ------------------------------------------------------------------------------------------------

    def backward(self, m: int, gradients: dict[int, Tensor] | None, last: bool) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs; the gradients of the weights are added to their `.grad`.

        Args:
            gradients: gradients of the outputs that have one, by the output's number; None if the forward computed
                the loss, whose gradient is the loss scale.
            last: whether this is the stage's last backward in the step.

        Returns:
            The gradient of each input that requires one.
        """
        kept = self._kept.pop(m)
        op = self._begin(Kind.BACKWARD, m)
        outputs, starts = kept.roots(gradients, self._loss_scale)
        with self._sync.backward(self._stage.number, last):
            if outputs:
                torch.autograd.backward(outputs, starts)
        self._record.end(op)
        return self._of_inputs(kept, [tensor.grad for tensor in kept.differentiable])

    # ---- I and W ------------------------------------------------------------------------------------------

    def input_grads(self, m: int, gradients: dict[int, Tensor] | None) -> tuple[Tensor, ...]:
        """Run the backward's first half: like `backward`, but without gradients of the weights."""
        kept = self._kept[m]
        op = self._begin(Kind.INPUT_GRAD, m)
        outputs, starts = kept.roots(gradients, self._loss_scale)
        with self._sync.backward(self._stage.number, last=False, half="I"):
            grads, kept.weight_grads = input_grads(outputs, starts, kept.differentiable)
            of_inputs = self._of_inputs(kept, grads)
            # What W needs is in `weight_grads`.
            kept.inputs = kept.outputs = ()
            del outputs, starts
            track(kept.weight_grads.held_gradients(), self._record)
        self._record.end(op)
        return of_inputs

    def weight_grads(self, m: int, last: bool) -> None:
        """Run the second half: compute the gradients of the weights, and add them to their `.grad`."""
        kept = self._kept.pop(m)
        assert kept.weight_grads is not None, "a valid schedule has I before W"
        op = self._begin(Kind.WEIGHT_GRAD, m)
        with self._sync.backward(self._stage.number, last, half="W"):
            kept.weight_grads.run()
        self._record.end(op)

    def _of_inputs(self, kept: KeptForward, grads: list[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs, with zeros for inputs that the outputs do not depend on."""
        pairs = zip(kept.differentiable, grads, strict=True)
        gradients = tuple(torch.zeros_like(tensor) if grad is None else grad for tensor, grad in pairs)
        track(gradients, self._record)
        return gradients

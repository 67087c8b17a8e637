"""The work of one stage for a micro-batch, recorded: its forward, and its backward, whole or in two halves.

    forward        F   the stage's outputs, or the micro-batch's share of the loss
    recompute          the forward again, where it kept only its inputs
    backward       B   gradients of the weights, and of the inputs
    input_grads    I   gradients of the inputs alone
    weight_grads   W   gradients of the weights alone

`StageWork` holds what a forward keeps for its backward (`KeptForward`), and releases it as soon as possible.
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
    """What the forward of one micro-batch keeps."""

    inputs: Value  # leaves of autograd's graph
    outputs: tuple[Any, ...] = ()  # or their edges in the graph, if the stage is recomputed as a whole
    call: RecomputedCall | None = None  # of a stage that is recomputed as a whole
    weight_grads: WeightGrads | None = None  # what I leaves for W

    @property
    def differentiable(self) -> list[Tensor]:
        """The inputs that require a gradient."""
        return [tensor for tensor in leaves(self.inputs) if tensor.requires_grad]

    def roots(
        self, gradients: dict[int, Tensor] | None, loss_scale: float
    ) -> tuple[list[Any], tuple[Tensor, ...]]:
        """Return the outputs from which the backward starts, and their gradients.

        `gradients` are by the output's number; None: the outputs are a share of the loss, whose gradient is the scale.
        """
        if gradients is None:
            losses = [loss for loss in self.outputs if loss.requires_grad]
            return losses, tuple(torch.full_like(loss, loss_scale) for loss in losses)
        return [self.outputs[i] for i in gradients], tuple(gradients.values())


LETTERS = {
    Kind.FORWARD: "F", Kind.RECOMPUTE: "F", Kind.BACKWARD: "B", Kind.INPUT_GRAD: "I", Kind.WEIGHT_GRAD: "W",
}  # fmt: skip
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
        """Note what forwards draw at random from now on; stop at None."""
        self._heard = heard
        self._compute.others = None if heard is None else heard.others

    def watch(self, facts: StepFacts) -> None:
        """Note what forwards and the loss do from now on."""
        if not self._compiled:
            self._facts = self._compute.facts = facts

    def _begin(self, kind: Kind, m: int) -> int:
        """Record the beginning of a computation with its FLOPs and bytes, and return its number."""
        key = self._microbatches[m].key
        if key not in self._flops:
            self._flops[key] = self._compute.flops(key)
        flops = self._flops[key]
        done, nbytes = flops.cost_of(kind)
        if kind in (Kind.BACKWARD, Kind.INPUT_GRAD):  # including recomputation
            if self._job.plan.recompute == "selective":
                done, nbytes = done + flops.attention[0], nbytes + flops.attention[1]
            for block in self._stage.recomputed:
                more = self._block_costs(key)(block.name)
                done, nbytes = done + more[0], nbytes + more[1]
        s = self._stage.number
        name = str(Action(LETTERS[kind], s, m))
        return self._record.begin(kind, name, stage=s, microbatch=m, flops=done, nbytes=nbytes)

    def _block_costs(self, key: Hashable) -> Callable[[str], tuple[float, int]]:
        """Return a function from a block's name to the FLOPs and bytes of its forward."""
        return lambda block: self._job.where.block_cost(key, self._stage.number, self._stage.names, block)

    def forward(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """Run F: return the stage's outputs for these inputs (`StageForward`)."""
        op = self._begin(Kind.FORWARD, m)
        if self._compute.evaluates:  # no backward follows, so nothing is kept
            outputs = self._compute(m, inputs)
            track(outputs, self._record)
            self._record.end(op)
            return outputs
        kept = self._kept[m] = KeptForward(inputs)
        if self._recompute:
            run, again = partial(self._compute, m, inputs), partial(self._again, m, inputs)
            kept.call = RecomputedCall(run, self._record, again=again, state=self._state)
            with self._hear_draws(m), self._hear_facts(m):
                outputs = kept.call()
            edges = (get_gradient_edge(each) if each.requires_grad else each for each in outputs)
            kept.outputs = outputs if self._compute.computes_loss else tuple(edges)  # without their content
        else:
            costs = self._block_costs(self._microbatches[m].key)
            scope = RecomputeScope(self._record, self._compute.attention, costs, self._stage.sharded.draws)
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
        """Return a context that hears the random draws of a micro-batch's forward, if wanted."""
        if self._heard is None or self._compiled:
            return nullcontext()
        return HeardDraws(self._heard.draws.setdefault((self._stage.number, m), []), self._heard)

    def _hear_facts(self, m: int) -> AbstractContextManager[Any]:
        """Return a context that notes what a micro-batch's forward does, if wanted."""
        data = leaves(self._microbatches[m].inputs)
        return nullcontext() if self._facts is None else self._facts.of_forward(len(data[0]) if data else 0)

    def recompute(self, m: int) -> None:
        """Run the forward again if it kept only its inputs; this needs no gradient of the outputs."""
        if self._recompute:
            call = self._kept[m].call
            assert call is not None
            call.again()

    def _again(self, m: int, inputs: Value) -> None:
        op = self._begin(Kind.RECOMPUTE, m)
        self._compute(m, inputs)
        self._record.end(op)

    def backward(self, m: int, gradients: dict[int, Tensor] | None, last: bool) -> tuple[Tensor, ...]:
        """Run B: add to the weights' gradients, and return the gradient of each input that requires one.

        `gradients` are those of outputs that have one, by the output's number; None if the forward computed the loss,
        whose gradient is the loss scale. `last` is whether this is the stage's last backward in the step.
        """
        kept = self._kept.pop(m)
        op = self._begin(Kind.BACKWARD, m)
        outputs, starts = kept.roots(gradients, self._loss_scale)
        with self._sync.backward(self._stage.number, last):
            if outputs:
                torch.autograd.backward(outputs, starts)
        self._record.end(op)
        return self._of_inputs(kept, [tensor.grad for tensor in kept.differentiable])

    def input_grads(self, m: int, gradients: dict[int, Tensor] | None) -> tuple[Tensor, ...]:
        """Run I: like `backward`, but without gradients of the weights."""
        kept = self._kept[m]
        op = self._begin(Kind.INPUT_GRAD, m)
        outputs, starts = kept.roots(gradients, self._loss_scale)
        with self._sync.backward(self._stage.number, last=False, half="I"):
            grads, kept.weight_grads = input_grads(outputs, starts, kept.differentiable)
            of_inputs = self._of_inputs(kept, grads)
            kept.inputs = kept.outputs = ()  # W needs only `weight_grads`
            del outputs, starts
            track(kept.weight_grads.held_gradients(), self._record)
        self._record.end(op)
        return of_inputs

    def weight_grads(self, m: int, last: bool) -> None:
        """Run W: compute the gradients of the weights, and add them to their `.grad`."""
        kept = self._kept.pop(m)
        assert kept.weight_grads is not None, "a valid schedule has I before W"
        op = self._begin(Kind.WEIGHT_GRAD, m)
        with self._sync.backward(self._stage.number, last, half="W"):
            kept.weight_grads.run()
        self._record.end(op)

    def _of_inputs(self, kept: KeptForward, grads: list[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs: zeros for inputs that the outputs do not depend on."""
        pairs = zip(kept.differentiable, grads, strict=True)
        gradients = tuple(torch.zeros_like(tensor) if grad is None else grad for tensor, grad in pairs)
        track(gradients, self._record)
        return gradients

"""What one stage does for a micro-batch, recorded: its forward, and its backward, whole or in two halves.

    forward        F   the stage's outputs, or the micro-batch's share of the loss
    recompute          the forward again, where it kept only its inputs
    backward       B   gradients of the weights, and of the inputs
    input_grads    I   gradients of the inputs alone
    weight_grads   W   gradients of the weights alone

What a forward keeps for its backward (`KeptForward`) is held here, by micro-batch, and released as soon as possible.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mpkit.strategies.compute.forward_state import KeptForward
from mpkit.strategies.compute.stage_forward import StageForward
from mpkit.strategies.compute.stage_record import StageRecord
from mpkit.strategies.data.microbatch import Value, leaves
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.heard_draws import ForwardDraws, HeardDraws
from mpkit.strategies.models.step_facts import StepFacts
from mpkit.strategies.stage.gradient_sync import GradientSync
from mpkit.strategies.stage.recompute import RecomputedCall, RecomputeScope, WrittenState
from mpkit.strategies.stage.selective_recompute import AttentionAgain
from mpkit.strategies.stage.split_backward import input_grads
from mpkit.strategies.stage.stage import Stage
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["StageWork"]


class StageWork:
    """One stage's forwards and backwards, step after step.

    Args:
        context: this rank's context.
        job: what to train, and how.
        stage: the stage's layers.
        compute: what its forward computes.
        sync: synchronizes gradients with the replicas.
    """

    def __init__(
        self,
        context: Context,
        job: TrainJob,
        stage: Stage,
        compute: StageForward,
        sync: GradientSync,
    ) -> None:
        self._stage, self._compute, self._sync = stage, compute, sync
        self._record = StageRecord(context.record, job, stage, compute.flops)
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

    # ---- F ------------------------------------------------------------------------------------------------

    def forward(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """Return what the stage's forward computes from its inputs (`StageForward`).

        Args:
            m: the micro-batch.
            inputs: leaves; those whose gradient is wanted require one.
        """
        key = self._key(m)
        op = self._record.begin(Kind.FORWARD, m, key)
        kept = self._kept[m] = KeptForward(inputs)
        recorder = self._record.recorder
        if self._recompute:
            kept.call = RecomputedCall(
                partial(self._compute, m, inputs),
                recorder,
                again=partial(self._again, m, inputs),
                state=self._state,
            )
            with self._hear_draws(m), self._hear_facts(m):
                outputs: tuple[Tensor, ...] = kept.call()
            edges = (get_gradient_edge(each) if each.requires_grad else each for each in outputs)
            kept.outputs = outputs if self._compute.computes_loss else tuple(edges)  # without their content
        else:
            scope = RecomputeScope(
                recorder, self._compute.attention, self._record.block_costs(key), self._stage.sharded.draws
            )
            with (
                self._record.count_saved(),
                AttentionAgain(recorder) if self._selective else nullcontext(),
                self._stage.recompute_blocks(scope),
                self._hear_draws(m),
                self._hear_facts(m),
            ):
                outputs = kept.outputs = self._compute(m, inputs)
        self._record.track(outputs)
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
        op = self._record.begin(Kind.RECOMPUTE, m, self._key(m))
        self._compute(m, inputs)
        self._record.end(op)

    # ---- B ------------------------------------------------------------------------------------------------

    def backward(self, m: int, gradients: dict[int, Tensor] | None, last: bool) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs; the gradients of the weights are added to their `.grad`.

        Args:
            m: the micro-batch.
            gradients: gradients of the outputs that have one, by the output's number; None if the forward computed
                the loss, whose gradient is the loss scale.
            last: whether this is the stage's last backward in the step.

        Returns:
            The gradient of each input that requires one.
        """
        kept = self._kept.pop(m)
        op = self._record.begin(Kind.BACKWARD, m, self._key(m))
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
        op = self._record.begin(Kind.INPUT_GRAD, m, self._key(m))
        outputs, starts = kept.roots(gradients, self._loss_scale)
        with self._sync.backward(self._stage.number, last=False, half="I"):
            grads, kept.weight_grads = input_grads(outputs, starts, kept.differentiable)
            of_inputs = self._of_inputs(kept, grads)
            # What W needs is in `weight_grads`.
            kept.inputs = kept.outputs = ()
            del outputs, starts
            self._record.track(kept.weight_grads.held_gradients())
        self._record.end(op)
        return of_inputs

    def weight_grads(self, m: int, last: bool) -> None:
        """Run the second half: compute the gradients of the weights, and add them to their `.grad`."""
        kept = self._kept.pop(m)
        assert kept.weight_grads is not None, "a valid schedule has I before W"
        op = self._record.begin(Kind.WEIGHT_GRAD, m, self._key(m))
        with self._sync.backward(self._stage.number, last, half="W"):
            kept.weight_grads.run()
        self._record.end(op)

    def _of_inputs(self, kept: KeptForward, grads: list[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs, with zeros for inputs that the outputs do not depend on."""
        pairs = zip(kept.differentiable, grads, strict=True)
        gradients = tuple(torch.zeros_like(tensor) if grad is None else grad for tensor, grad in pairs)
        self._record.track(gradients)
        return gradients

"""DP: data parallelism as torch.nn.DataParallel does it. Rank 0 has the model, the data and the optimizer.

A batch goes through these phases, five of which are exchanges between rank 0 and the other ranks:

    scatter     rank 0 scatters the inputs                                          exchange 1
    replicate   rank 0 broadcasts its parameters                                    exchange 2
    forward     each rank computes its share
    gather      the outputs are gathered on rank 0                                  exchange 3
    loss        rank 0 computes the loss of all outputs, and its gradient for each of them
    return      rank 0 scatters those gradients                                     exchange 4
    backward    each rank computes its share
    reduce      the gradients of the parameters are summed on rank 0; the others    exchange 5
                free parameters and gradients

and then rank 0 steps. The loss, the optimizer and all outputs make rank 0 compute more and hold more than the others,
which wait for it. Parameters are sent again for every batch. DDP (`mpkit.strategies.replicas.ddp`) avoids both,
with one exchange per batch.

`mpkit.strategies.reference.dp` is the whole algorithm in 25 lines. This module adds outputs and inputs that are not
single tensors, batches that the number of ranks does not divide, micro-batches, buffers, and all parameters in one
message.

Each micro-batch goes through all phases, as if nn.DataParallel were called for each; gradients add up on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpkit.strategies.compute.stage_work import StageWork
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.heard_draws import ForwardDraws
from mpkit.strategies.models.step_facts import StepFacts
from mpkit.strategies.nn_dataparallel.gathered_loss import ShareForward, gathered_loss
from mpkit.strategies.nn_dataparallel.replicate_parameters import ReplicateParameters
from mpkit.strategies.nn_dataparallel.scatter_feed import (
    RowSpec,
    ScatteredMicroBatch,
    pack_rows,
    pad_rows,
    row_bytes,
    unpack_rows,
)
from mpkit.strategies.replicas.part import unused_error
from mpkit.strategies.stage.gradient_sync import GradientSync
from mpkit.strategies.stage.stage import Stage

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["DP"]


class DP(GradientSync):
    """One rank of DP: the owner of the model (rank 0), or one of those that receive a replica for each batch.

    Args:
        context: this rank's context.
        job: what to train, and how.
        stages: the whole model as one stage, on this rank's device.

    Attributes:
        loss_scale: factor of the gradients, which lets fp16 represent them.
        computes_loss: whether this rank computes the loss.
    """

    def __init__(self, context: Context, job: TrainJob, stages: dict[int, Stage]) -> None:
        super().__init__(stages)
        self._comm, self._device, self._ledger = context.comm, context.device, context.record.ledger
        self._rank, self._n = context.rank, job.plan.dp
        self._context, self._job = context, job
        self.loss_scale = 1.0
        self.computes_loss = context.rank == 0
        self._names = {piece.parameter: piece.name for piece in self.pieces}
        self._grads_ready: set[Tensor] = set()  # whose gradient arrived on this rank in this step
        self._computed = False  # whether this rank had samples in this step
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._grads_ready.add)
        if self._rank != 0:
            self.pieces, self.frozen = [], []  # rank 0 updates, and holds frozen parameters
        self._replicate = ReplicateParameters(context, job.plan, stages[0].layers)
        self._forward = ShareForward(context, job, stages[0])
        self._work = StageWork(context, job, stages[0], self._forward, sync=self)

    # ---- a step -------------------------------------------------------------------------------------------

    def listen(self, heard: ForwardDraws | None) -> None:
        """Note what forwards draw at random from now on; None: no longer."""
        self._work.listen(heard)

    def watch(self, facts: StepFacts) -> None:
        """Note from now on what forwards and losses do."""
        self._work.watch(facts)

    def begin_step(self) -> None:
        """Drop the gradients of the previous step."""
        self._replicate.drop_gradients()
        self._grads_ready.clear()
        self._computed = False

    def step(self, number: int, microbatches: list[MicroBatch]) -> list[float]:
        """Run the forward and backward of a batch; rank 0 ends with the gradients.

        Args:
            number: number of the step.
            microbatches: this rank's share of the batch; on rank 0 every rank's (`ScatteredMicroBatch`).

        Returns:
            The mean loss over the batch on rank 0, with the count if it has one; nothing on the others.
        """
        self._work.begin_step(number, microbatches, self.loss_scale)
        losses = [self._microbatch(m, scattered) for m, scattered in enumerate(microbatches)]
        return [float(sum(each)) for each in zip(*losses, strict=True)]

    def _microbatch(self, m: int, scattered: MicroBatch) -> list[float]:
        assert isinstance(scattered, ScatteredMicroBatch)
        has_samples = scattered.rows[self._rank] > 0
        inputs = self._scatter(scattered)
        # ---- replicate
        self._replicate.replicate()
        # ---- forward
        outputs = self._work.forward(m, inputs) if has_samples else ()
        # ---- gather
        whole = self._gather(scattered, outputs)
        del outputs  # held until the backward, unless it recomputes them
        # ---- loss
        loss: list[float] = []
        gradients = None
        if self._rank == 0:
            loss, gradients = gathered_loss(self._context, self._job, m, scattered, whole, self.loss_scale)
        # ---- return
        mine = self._return(scattered, gradients)
        # ---- backward
        self._replicate.begin_gradients()
        if has_samples:
            self._work.recompute(m)
            self._work.backward(m, mine, last=m == self._job.plan.microbatches - 1)
            self._computed = True
        # ---- reduce
        self._replicate.reduce()
        self._replicate.drop_replicas()
        return loss

    def finish(self) -> None:
        """Handle parameters without a gradient.

        Raises:
            MpkitError: there is one, and the plan does not allow that.
        """
        missing = [name for parameter, name in self._names.items() if parameter not in self._grads_ready]
        if self._job.plan.unused == "error":
            if missing and self._computed:
                raise unused_error(missing)
            return
        # A parameter that no rank used has no gradient, as in serial training, so that the optimizer leaves it alone.
        counts = self._replicate.count_used([parameter in self._grads_ready for parameter in self._names])
        for parameter, count in zip(self._names, counts, strict=True):
            if count == 0:
                parameter.grad = None

    # ---- the exchanges of rows ----------------------------------------------------------------------------

    def _scatter(self, scattered: ScatteredMicroBatch) -> Value:
        """Return this rank's inputs, scattered by rank 0."""
        like = self._forward.narrow(scattered.inputs)
        specs = [RowSpec.from_tensor(tensor) for tensor in leaves(like)]
        given = [leaves(self._forward.onto_device(inputs)) for inputs, _ in scattered.by_rank]
        tensors = iter(self._scatter_rows(scattered, specs, given))
        return map_tensors(lambda _: next(tensors), like)

    def _gather(self, scattered: ScatteredMicroBatch, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gather every rank's outputs on rank 0, (samples, ...) each."""
        k, specs = max(scattered.rows), self._specs(scattered)
        nothing = torch.empty(0, row_bytes(specs), dtype=torch.uint8, device=self._device)
        packed = self._comm.gather(pad_rows(pack_rows(outputs) if outputs else nothing, k))
        if self._rank != 0:
            return ()
        if min(scattered.rows) < k:
            packed = torch.cat([packed[r * k : r * k + rows] for r, rows in enumerate(scattered.rows)])
        self._ledger.track(packed, "activations")
        return unpack_rows(packed, specs)

    def _return(
        self, scattered: ScatteredMicroBatch, gradients: tuple[Tensor | None, ...] | None
    ) -> dict[int, Tensor]:
        """Return this rank's share of the gradients of the outputs that have one, by the output's number."""
        wanted = [
            i
            for i, spec in enumerate(self._job.where.boundary(scattered.keys[0], 0).specs)
            if spec.requires_grad
        ]
        if len(wanted) > 1:  # the loss need not use all outputs; nothing is sent back for the others
            has_gradient = [gradients is not None and gradients[i] is not None for i in wanted]
            flags = torch.tensor(has_gradient, dtype=torch.uint8, device=self._device)
            wanted = [i for i, flag in zip(wanted, self._comm.broadcast(flags).tolist(), strict=True) if flag]
        if not wanted:
            return {}
        given: list[list[Tensor]] = []
        if gradients is not None:
            returned = [gradient for i in wanted if (gradient := gradients[i]) is not None]
            parts = [gradient.split(scattered.rows) for gradient in returned]
            given = [list(share) for share in zip(*parts, strict=True)]
        specs = self._specs(scattered)
        mine = self._scatter_rows(scattered, [specs[i] for i in wanted], given)
        return dict(zip(wanted, mine, strict=True))

    def _scatter_rows(
        self, scattered: ScatteredMicroBatch, specs: list[RowSpec], given: list[list[Tensor]]
    ) -> tuple[Tensor, ...]:
        """Scatter the tensors that rank 0 has for each rank; return this rank's, (its rows, ...) each."""
        n, k = self._n, max(scattered.rows)
        if self._rank == 0:
            packed = torch.cat([pad_rows(pack_rows(tensors), k) for tensors in given])
            packed = pad_rows(packed, n * k)
            self._ledger.track(packed, "buffers")
        else:
            packed = torch.empty(1, dtype=torch.uint8, device=self._device).expand(n * k, row_bytes(specs))
        mine = self._comm.scatter(packed)
        self._ledger.track(mine, "activations")
        return unpack_rows(mine[: scattered.rows[self._rank]], specs)

    def _specs(self, scattered: ScatteredMicroBatch) -> list[RowSpec]:
        """Return the specs of the model's outputs for one sample."""
        return [
            RowSpec(spec.shape[1:], spec.dtype)
            for spec in self._job.where.boundary(scattered.keys[0], 0).specs
        ]

    @contextmanager
    def scatter_inputs(
        self, scattered: ScatteredMicroBatch
    ) -> Iterator[tuple[Value, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]]:
        """Scatter a micro-batch and replicate the parameters, for a forward without a backward inside the block.

        Yields:
            This rank's inputs, and a function that gathers every rank's outputs on rank 0.
        """
        inputs = self._scatter(scattered)
        self._replicate.replicate()
        yield inputs, lambda outputs: self._gather(scattered, outputs)
        self._replicate.drop_replicas()

    # ---- looking at it ------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Replicate the parameters on this rank inside the block, which every rank enters."""
        self._replicate.replicate()
        yield
        self._replicate.drop_replicas()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole state on rank 0, and nothing on the others."""
        return self.stages[0].state_dict() if self._rank == 0 else {}

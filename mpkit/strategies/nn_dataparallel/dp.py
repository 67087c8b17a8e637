"""DP: data parallelism as torch.nn.DataParallel does it. Rank 0 has the model, the data and the optimizer.

A micro-batch goes through these phases; five of them are exchanges between rank 0 and the other ranks:

    1 scatter    rank 0 scatters the inputs, n equal parts
    2 replicate  rank 0 broadcasts its parameters; each rank computes the outputs of its part
    3 gather     the outputs are gathered on rank 0, which computes the loss, and its gradient for each output
    4 scatter    rank 0 scatters these gradients; each rank computes its backward
    5 reduce     the gradients of the parameters are summed on rank 0; the others free parameters and gradients

and then rank 0 steps. The loss, the optimizer and all outputs make rank 0 compute more and hold more than the others,
which wait for it. Rank 0 sends the parameters for every micro-batch, as if nn.DataParallel were called for each. DDP
(`mpkit.strategies.replicas.ddp`) avoids all this, with one exchange per batch. Rank 0 evaluates by itself.

As in torch.nn.DataParallel, a replica lives for one forward and its backward. The parameters of a dtype lie side by
side in one tensor, and so do their gradients. `mpkit.strategies.reference.dp` is the algorithm, and has the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.errors import MpkitError
from mpkit.plan.plan import Plan
from mpkit.strategies.compute.stage_forward import StageForward, loss_share
from mpkit.strategies.compute.stage_work import StageWork
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors, shares, signature
from mpkit.strategies.job.feed import Feed, MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.heard_draws import ForwardDraws
from mpkit.strategies.models.step_facts import StepFacts
from mpkit.strategies.replicas.buffers import broadcast_tensors, unequal_buffers
from mpkit.strategies.replicas.flat import Flat, FlatLayout
from mpkit.strategies.replicas.part import unused_error
from mpkit.strategies.stage.gradient_sync import GradientSync
from mpkit.strategies.stage.stage import Stage, onto_device, track
from mpkit.trace import Kind

if TYPE_CHECKING:
    from collections.abc import Hashable

    from mpkit.strategies.rank_context import Context
    from mpkit.trace.record.flops import Flops


class Replica:
    """The parameters, buffers and gradients of a module, which rank 0 owns and the others hold while they compute."""

    def __init__(self, context: Context, plan: Plan, module: nn.Module) -> None:
        self._comm, self._owns = context.comm, context.rank == 0
        self._plan, self._module = plan, module
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in module.parameters():
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._flats = [self._flat(context, each, "params") for each in by_dtype.values()]
        for flat in self._flats:
            for parameter, view in zip(flat.layout.parameters, flat.views, strict=True):
                parameter.data = view.copy_(parameter.detach())
        trained = ([p for p in each if p.requires_grad] for each in by_dtype.values())
        self._gradients = [self._flat(context, each, "grads") for each in trained if each]
        for flat in self._gradients:
            flat.drop()
        self.drop()

    def _flat(self, context: Context, parameters: list[nn.Parameter], category: str) -> Flat:
        return Flat(FlatLayout(parameters, 0, 1), context.record, category, context.comm)

    def replicate(self) -> None:
        """Broadcast all of rank 0's parameters at once, and its buffers."""
        for flat in self._flats:
            flat.allocate()
            self._comm.broadcast(flat.whole)
        broadcast_tensors(self._comm, (b for b in unequal_buffers(self._plan, self._module) if b.numel()))

    def drop(self) -> None:
        """Free the replica, so that only rank 0 holds parameters."""
        for flat in () if self._owns else self._flats:
            flat.drop()

    def begin_gradients(self) -> None:
        """Allocate zero gradients, if there are none; the backward adds into them in place."""
        for flat in self._gradients:
            if not flat.there:
                flat.allocate()
                flat.whole.zero_()
                for parameter, view in zip(flat.layout.parameters, flat.views, strict=True):
                    parameter.grad = view

    def reduce(self) -> None:
        """Sum all ranks' gradients on rank 0, with one reduce per dtype; the others free theirs."""
        for flat in self._gradients:
            self._comm.reduce(flat.whole, in_place=True)
        if not self._owns:
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        for flat in self._gradients:
            flat.drop()
            for parameter in flat.layout.parameters:
                parameter.grad = None


@dataclass
class ScatteredMicroBatch(MicroBatch):
    """A rank's share of a micro-batch, and on rank 0 the shares of all ranks, one after the other."""

    whole: tuple[Value, Value] | None = None  # (inputs, targets) of all shares on rank 0; None on the others


class ScatterFeed(Feed):
    """Feeds rank 0 with whole micro-batches, and the other ranks with their shares, for the shapes."""

    def __init__(self, context: Context, job: TrainJob) -> None:
        super().__init__(context, job, needed=True)
        self._owns = context.rank == 0

    def _wanted_parts(self, step: int) -> list[slice]:
        if not self._owns:
            return super()._wanted_parts(step)
        return [part for each in self._shares(step) for part in each]

    def _shares(self, step: int) -> list[list[slice]]:
        size = self._source.size(step)
        return shares(size, min(self._m, size), self._n)

    def take(self, step: int) -> list[MicroBatch]:
        """Return a step's micro-batches, each a `ScatteredMicroBatch`."""
        scattered = [ScatteredMicroBatch(**vars(each)) for each in super().take(step)]
        if self._owns:
            for each, parts in zip(scattered, self._shares(step), strict=True):
                loaded = [self._load(step, part, each.key) for part in parts]
                each.whole = _join([x for x, _ in loaded]), _join([y for _, y in loaded])
        return list(scattered)


def _join(values: list[Value]) -> Value:
    """Concatenate the shares of all ranks."""
    parts = [iter(leaves(value)) for value in values]
    return map_tensors(lambda _: torch.cat([next(part) for part in parts]), values[0])


class ShareForward(StageForward):
    """The forward of the whole model without its loss, for one rank's share of a micro-batch."""

    def __init__(self, context: Context, job: TrainJob, stage: Stage) -> None:
        super().__init__(context, job, stage)
        self.computes_loss = False  # rank 0 gathers the outputs

    def flops(self, key: Hashable) -> Flops:
        """Return FLOPs and bytes of the layers' forward and backward."""
        return self._job.where.flops(key, self._s, loss=False)

    def _refusal(self, m: int, made: str, expected: str) -> str:
        return (
            f"the model made {made}, and {expected} of inputs of the same shape before: DP gathers outputs, whose "
            "shapes may depend on the shapes of the data, and not on its values. Plan.ddp gathers none."
        )


class DP(GradientSync):
    """One rank of DP: the owner of the model (rank 0), or one that receives a replica for each micro-batch."""

    def __init__(self, context: Context, job: TrainJob, stages: dict[int, Stage]) -> None:
        super().__init__(stages)  # the whole model as one stage
        self._comm, self._device, self._record = context.comm, context.device, context.record
        self._job, self._n = job, job.plan.dp
        self._owns = self.computes_loss = context.rank == 0
        self.loss_scale = 1.0  # factor of the gradients, which lets fp16 represent them
        self._names = {piece.parameter: piece.name for piece in self.pieces}
        self._grads_ready: set[Tensor] = set()  # have had a gradient on this rank in this step
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._grads_ready.add)
        if not self._owns:
            self.pieces, self.frozen = [], []  # rank 0 updates, and holds frozen parameters
        self._replica = Replica(context, job.plan, stages[0].layers)
        self._forward = ShareForward(context, job, stages[0])
        self._work = StageWork(context, job, stages[0], self._forward, sync=self)

    # ---- a step -------------------------------------------------------------------------------------------

    def listen(self, heard: ForwardDraws | None) -> None:
        """Note the random draws of forwards from now on; None: no longer."""
        self._work.listen(heard)

    def watch(self, facts: StepFacts) -> None:
        """Note facts about forwards from now on."""
        self._work.watch(facts)

    def begin_step(self) -> None:
        """Drop the gradients of the previous step."""
        self._replica.drop_gradients()
        self._grads_ready.clear()

    def step(self, number: int, microbatches: list[MicroBatch]) -> list[float]:
        """Compute a batch's gradients on rank 0; return the mean loss there, with its count if it has one."""
        self._work.begin_step(number, microbatches, self.loss_scale)
        size = sum(each.samples for each in microbatches)
        losses = [self._microbatch(m, each, each.samples / size) for m, each in enumerate(microbatches)]
        return [float(sum(each)) for each in zip(*losses, strict=True)]

    def _microbatch(self, m: int, microbatch: MicroBatch, weight: float) -> list[float]:
        assert isinstance(microbatch, ScatteredMicroBatch)
        whole = microbatch.whole
        # ---- 1 scatter
        inputs = self._forward.onto_device(microbatch.inputs if whole is None else whole[0])
        share = map_tensors(self._scatter if self._owns else self._receive, inputs)
        del inputs
        # ---- 2 replicate
        self._replica.replicate()
        outputs = self._work.forward(m, share)
        # ---- 3 gather
        gathered = [self._comm.gather(output.detach()) for output in outputs]
        specs = self._job.where.boundary(microbatch.key, 0).specs
        wants = [i for i, spec in enumerate(specs) if spec.requires_grad]  # outputs that the loss uses
        like = {i: outputs[i].new_empty(1).expand_as(outputs[i]) for i in wants}
        del outputs  # held until the backward, unless it recomputes them
        loss: list[float] = []
        gradients: dict[int, Tensor] = {}
        if whole is not None:
            track(gathered, self._record)
            loss, gradients = self._loss(m, gathered, whole[1], signature(*whole), weight)
        # ---- 4 scatter
        mine = {i: self._scatter(gradients[i]) if self._owns else self._receive(like[i]) for i in wants}
        del gathered, gradients
        self._replica.begin_gradients()
        self._work.recompute(m)
        self._work.backward(m, mine, last=m == self._job.plan.microbatches - 1)
        # ---- 5 reduce
        self._replica.reduce()
        self._replica.drop()
        return loss

    def _scatter(self, whole: Tensor) -> Tensor:
        """Scatter a tensor (n k, ...) of rank 0; return its own part (k, ...)."""
        part = self._comm.scatter(whole)
        track([part], self._record)
        return part

    def _receive(self, like: Tensor) -> Tensor:
        """Receive this rank's part, which has this shape (k, ...), of rank 0's tensor."""
        return self._scatter(like.new_empty(1).expand(self._n * len(like), *like.shape[1:]))

    def _loss(
        self, m: int, outputs: list[Tensor], targets: Value, key: Hashable, weight: float
    ) -> tuple[list[float], dict[int, Tensor]]:
        """Compute a micro-batch's share of the loss on rank 0, forward and backward, both recorded.

        Outputs and targets (samples, ...) are those of all ranks, `key` the signature of the whole micro-batch. Return
        the share of the loss, with its count if it has one, and the gradients of the outputs, by their number.
        """
        record, boundary = self._record, self._job.where.boundary(key, 0)
        flops = self._job.where.numbers[key][-1].flops
        targets = onto_device(targets, self._device, record)
        ends = tuple(
            out.requires_grad_(spec.requires_grad) for out, spec in zip(outputs, boundary.specs, strict=True)
        )
        # ---- forward
        op = record.begin(Kind.FORWARD, "loss", microbatch=m, flops=flops.forward, nbytes=flops.forward_bytes)
        with record.memory.saving():
            loss, *count = loss_share(self._job, boundary.pack(ends), targets, weight)
        record.end(op)
        # ---- backward
        op = record.begin(
            Kind.BACKWARD, "loss", microbatch=m, flops=flops.backward, nbytes=flops.backward_bytes
        )
        torch.autograd.backward([loss], [torch.full_like(loss, self.loss_scale)])
        gradients = {i: end.grad for i, end in enumerate(ends) if end.grad is not None}
        track(gradients.values(), record)
        record.end(op)
        unused = [i for i, end in enumerate(ends) if end.requires_grad and i not in gradients]
        if unused:
            raise MpkitError(
                f"the loss did not use the model's outputs number {', '.join(map(str, unused))} in this micro-batch, "
                "and did before the start; DP sends the gradients of the same outputs back to their ranks in each. "
                f"Plan.ddp({self._n}) sends none."
            )
        return [loss.item(), *(each.item() for each in count)], gradients

    def finish(self) -> None:
        """Reject parameters without a gradient, or, if the plan allows them, drop their zeros, as if serial."""
        if self._job.plan.unused == "error":
            missing = [name for parameter, name in self._names.items() if parameter not in self._grads_ready]
            if missing:
                raise unused_error(missing)
            return
        used = torch.tensor([parameter in self._grads_ready for parameter in self._names], dtype=torch.int32)
        counts = self._comm.reduce(used.to(self._device)).tolist()
        for parameter, count in zip(self._names, counts, strict=True):
            if count == 0:
                parameter.grad = None

    # ---- looking at it ------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Replicate the parameters on this rank inside the block, which every rank enters."""
        self._replica.replicate()
        yield
        self._replica.drop()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole state on rank 0, and nothing on the others."""
        return self.stages[0].state_dict() if self._owns else {}

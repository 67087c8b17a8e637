"""TrainJob: all that a rank needs to know to do its part of a training, as data that
`mpkit.strategies.prepare.prepare` makes.

    what     the model, its data and its loss       `Problem`
    how      the optimizer, the steps, checkpoints  `Procedure`
    where    which rank does which part             `ResolvedPlan`

A job is never changed. Where a rank sees it differently, it derives a job of its own from it (`TrainJob.for_place`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.plan.mesh import Mesh
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.strategies.checkpoint.files import CheckpointSaving, Resume
from mpkit.strategies.data.batches import Batches
from mpkit.strategies.job.feed import WholeBatches
from mpkit.strategies.models.hooks import Hook
from mpkit.strategies.partition.graph import PartitionedModel
from mpkit.strategies.partition.value import Boundary, LayerNumbers, Route, SharedWeight
from mpkit.strategies.stage.shard import ShardedModel
from mpkit.trace.record.flops import Flops, total


@dataclass(frozen=True)
class Problem:
    """What is trained."""

    model: nn.Module  # on the CPU; a rank takes its own layers out and drops the weights of the rest
    batches: WholeBatches | Batches  # what each step takes, on the CPU
    loss: Callable[[Any, Any], Tensor]  # returns a scalar, the mean over the batch, or (total, count)
    names: list[str]  # of the model's state dict, in order
    nominal: float | None = None  # a batch's approximate count (`loss.counted`); None for a mean over samples
    parameter_hooks: list[Hook] = field(default_factory=list)  # kept here, since pickling drops them
    given_loss: Callable[[Any, Any], Any] | None = None  # the loss as the user gave it


@dataclass(frozen=True)
class Procedure:
    """How it is trained."""

    optimizer: Callable[[Any], torch.optim.Optimizer]  # for all trained parameters
    steps: int  # counted from the very beginning
    seed: int  # of the ranks' random states
    max_grad_norm: float | None = None  # the global norm to which gradients are clipped; None: they are not
    lr_schedule: Callable[[int], float] | None = None  # factor of the learning rate in step i; None: always 1
    saving: CheckpointSaving | None = None  # when and where checkpoints are saved; None: never
    resume: Resume | None = None  # the checkpoint from which training resumes; None for a new training
    facts: dict[str, Any] = field(default_factory=dict)  # what a checkpoint and this training must share
    on_step: Callable[[Any, int], Any] | None = None  # on_step(context, step), on every rank after each step
    evaluation: EvaluationData | None = None  # what the model is evaluated on in between
    ema: float | None = None  # decay of the weights' moving average, which the optimizer keeps
    # The steps that are compared with serial training, counted from 0, in order.
    verified: tuple[int, ...] = ()
    unverified: str = ""  # why none is, or not every one that was requested; "" if all are
    gpu: int | None = None  # the GPU on which they are compared; None: in the memory of the caller's process
    by_owner: bool = False  # ZeRO-1 gives each parameter whole to one rank, since the optimizer needs it

    @property
    def first_step(self) -> int:
        """The number of the first step: 0, or where the checkpoint ends."""
        return 0 if self.resume is None else self.resume.head.step


@dataclass(frozen=True)
class TrainJob:
    """A training, ready to start; `meta` is what the trace records of it, in JSON types."""

    what: Problem
    how: Procedure
    where: ResolvedPlan
    meta: dict[str, Any]

    @property
    def plan(self) -> Plan:
        """The requested plan."""
        return self.where.plan

    def for_place(self, place: int) -> TrainJob:
        """Return the job as a rank at this place along tp sees it."""
        return replace(self, where=self.where.for_place(place))

    def without_proof(self, why: str) -> TrainJob:
        """Return the same job without steps that are compared with serial training, and why."""
        return replace(self, how=replace(self.how, verified=(), unverified=self.how.unverified or why))

    def with_model(self, model: nn.Module) -> TrainJob:
        """Return the same job for another copy of the model."""
        return replace(self, what=replace(self.what, model=model))

    def for_evaluation(self) -> TrainJob:
        """Return the same job on the data for evaluation; each step is a batch."""
        assert self.how.evaluation is not None
        batches = self.how.evaluation.batches
        how = replace(self.how, steps=len(batches), resume=None, saving=None)
        return replace(self, what=replace(self.what, batches=batches), how=how)

    def with_loss(self, loss: Callable[[Any, Any], Tensor]) -> TrainJob:
        """Return the same job with another loss."""
        return replace(self, what=replace(self.what, loss=loss))


@dataclass(frozen=True)
class EvaluationData:
    """What is evaluated, and when."""

    batches: WholeBatches | Batches  # each of them is evaluated, once
    metric: Callable[[Any, Any], Any] | None  # returns a mean, (total, count), or a dict of these
    names: tuple[str, ...]  # of what is measured, the loss first
    every: int  # steps from one evaluation to the next; the last step is followed by one too


def due(evaluation: EvaluationData | None, step: int, steps: int) -> bool:
    """Return whether a step is followed by an evaluation."""
    return evaluation is not None and ((step + 1) % evaluation.every == 0 or step + 1 == steps)


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan together with everything that follows from it for one model and its batches; it travels to the ranks.

    `mpkit.strategies.prepare.resolve` builds it once, and nobody works out again where the model is cut, what crosses
    from stage to stage, or what a stage computes. Fields "along tp" hold one entry per place along tp, or a single one
    if all are equal.
    """

    plan: Plan
    schedule: Schedule
    stages: tuple[range, ...]  # the numbers of each stage's layers; `range(1)` for a partitioned model
    placed: tuple[tuple[str, ...], ...]  # the names of each stage's layers, or blocks if it is partitioned
    held: tuple[tuple[str, ...], ...]  # the names of the parameters that each stage computes with
    shared: tuple[SharedWeight, ...]  # tied weights that several stages compute with
    # What each layer does to a micro-batch, and last the loss, by the micro-batch's signature; along tp.
    numbers_of: tuple[dict[Hashable, list[LayerNumbers]], ...]
    partitions: tuple[PartitionedModel | None, ...]  # along tp; None for a chain
    sharded: tuple[ShardedModel, ...]  # which parameters are divided; along tp
    parameters: tuple[int, ...]  # by rank, the trained elements that it would hold without ZeRO
    loss_sends: tuple[int, int]  # bytes that the largest micro-batch's loss all-reduces, all-gathers over tp
    place: int = 0  # the place along tp whose numbers the methods return

    @property
    def mesh(self) -> Mesh:
        """The mesh of ranks."""
        return self.plan.mesh

    def for_place(self, place: int) -> ResolvedPlan:
        """Return the same outcome as the ranks at this place see it."""
        return replace(self, place=place)

    @property
    def computes_loss_at_once(self) -> bool:
        """Whether one rank computes the loss of all samples of a batch at once."""
        plan = self.plan
        return plan.microbatches == 1 and plan.cp == 1 and (plan.dp == 1 or plan.data_parallel == "dp")

    @property
    def numbers(self) -> dict[Hashable, list[LayerNumbers]]:
        """What each layer does to a micro-batch here, and last the loss, by the micro-batch's signature."""
        return self.numbers_of[self.place % len(self.numbers_of)]

    @property
    def partition(self) -> PartitionedModel | None:
        """How a model that is not a chain is divided among the stages; None for a chain."""
        return self.partitions[self.place % len(self.partitions)]

    # ---- boundaries ---------------------------------------------------------------------------------------

    def boundary(self, key: Hashable, stage: int) -> Boundary:
        """Return what crosses from a stage of a chain to the next, for micro-batches of this signature."""
        output = self.numbers[key][self.stages[stage].stop - 1].output
        assert output is not None, "a chain whose layers hand on something else is partitioned"
        return output

    def incoming_routes(self, key: Hashable, stage: int) -> list[Route]:
        """Return the routes that end at a stage for this signature; in a chain, from the stage before."""
        if self.partition is not None:
            return [route for route in self.partition.divisions[key].routes if route.target == stage]
        return [] if stage == 0 else self.outgoing_routes(key, stage - 1)

    def outgoing_routes(self, key: Hashable, stage: int) -> list[Route]:
        """Return the routes that begin at a stage, for micro-batches of this signature."""
        if self.partition is not None:
            return [route for route in self.partition.divisions[key].routes if route.source == stage]
        if stage == len(self.stages) - 1:
            return []
        specs = self.boundary(key, stage).specs
        return [Route(stage, stage + 1, tuple(range(len(specs))), specs)]

    # ---- FLOPs --------------------------------------------------------------------------------------------

    def flops(self, key: Hashable, stage: int, *, loss: bool = True) -> Flops:
        """Return FLOPs and bytes of a stage for micro-batches of this signature; `loss` adds the last stage's loss."""
        if self.partition is not None:
            return self.partition.divisions[key].flops(stage)
        numbers = self.numbers[key]
        held = [numbers[layer].flops for layer in self.stages[stage]]
        if loss and stage == len(self.stages) - 1:
            held.append(numbers[-1].flops)
        return total(held)

    def flops_of_a_sample(self) -> float:
        """Return the FLOPs of one sample's forward through the whole model."""
        key = next(iter(self.numbers))
        assert isinstance(key, tuple)
        samples: int = key[0][1][0]
        return sum(self.flops(key, stage).forward for stage in range(len(self.stages))) / samples

    def block_cost(self, key: Hashable, stage: int, names: list[str], block: str) -> tuple[float, int]:
        """Return FLOPs and bytes of a block's forward for this signature, as far as they were counted.

        `names` are those of the stage's layers.
        """
        if self.partition is not None:
            nodes = self.partition.divisions[key].graph.nodes
            costs = [node.flops for node in nodes if node.block and f"{node.name}.".startswith(f"{block}.")]
            return sum(flops.forward for flops in costs), sum(flops.forward_bytes for flops in costs)
        for name, i in zip(names, self.stages[stage], strict=True):
            flops = self.numbers[key][i].flops
            if name == block:
                return flops.forward, flops.forward_bytes
            if not name or block.startswith(f"{name}."):
                return flops.layers.get(block.removeprefix(f"{name}.") if name else block, (0.0, 0))
        return 0.0, 0

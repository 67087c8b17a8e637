"""TrainJob: all that a rank needs to know to do its part of a training, as data that
`mpkit.strategies.prepare.prepare` makes.

    what     the model, its data and its loss       `Problem`
    how      the optimizer, the steps, checkpoints  `Procedure`
    where    which rank does which part             `ResolvedPlan`

A job is never changed. Where a rank sees it differently, it derives a job of its own from it (`TrainJob.for_place`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.plan.plan import Plan
from mpkit.strategies.checkpoint.files import CheckpointSaving, Resume
from mpkit.strategies.data.batches import Batches
from mpkit.strategies.job.feed import WholeBatches
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.models.hooks import Hook


@dataclass(frozen=True)
class Problem:
    """What is trained.

    Attributes:
        model: on the CPU; a rank takes its own layers out and drops the weights of the rest.
        batches: what each step takes, on the CPU.
        loss: loss(outputs, targets) -> scalar, the mean over the batch, or (total, count).
        names: names of the model's state dict, in order.
        nominal: approximate count of a batch, for a loss that returns (total, count)
            (`mpkit.strategies.loss.counted`); None for a mean over samples.
        parameter_hooks: hooks on the model's parameters, by their first names; pickling drops those.
        given_loss: the loss as it was given.
    """

    model: nn.Module
    batches: WholeBatches | Batches
    loss: Callable[[Any, Any], Tensor]
    names: list[str]
    nominal: float | None = None
    parameter_hooks: list[Hook] = field(default_factory=list)
    given_loss: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True)
class Procedure:
    """How it is trained.

    Attributes:
        optimizer: optimizer(params) -> torch.optim.Optimizer, for all trained parameters.
        steps: number of steps, counted from the very beginning.
        seed: seed of the ranks' random states.
        max_grad_norm: maximum global norm, to which gradients are clipped; None if they are not.
        lr_schedule: factor of the learning rate in step i; None for a factor of 1.
        saving: when and where checkpoints are saved; None: never.
        resume: the checkpoint from which training resumes; None for a new training.
        facts: facts about model and optimizer that a checkpoint has to share.
        on_step: on_step(context, step), called on every rank after each step; None: nothing is.
        evaluation: what the model is evaluated on in between; None: nothing.
        ema: decay of the weights' moving average, which the optimizer keeps; None: there is none.
        verified: the steps that are compared with serial training, counted from 0, in order.
        unverified: why none is, or not every one that was asked for; "" if all are.
        gpu: the number of the GPU on which they are compared; None: in the memory of the caller's process.
        by_owner: whether ZeRO-1 gives each parameter whole to one rank, since the optimizer needs it.
    """

    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int
    seed: int
    max_grad_norm: float | None = None
    lr_schedule: Callable[[int], float] | None = None
    saving: CheckpointSaving | None = None
    resume: Resume | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    on_step: Callable[[Any, int], Any] | None = None
    evaluation: EvaluationData | None = None
    ema: float | None = None
    verified: tuple[int, ...] = ()
    unverified: str = ""
    gpu: int | None = None
    by_owner: bool = False

    @property
    def first_step(self) -> int:
        """The number of the first step: 0, or where the checkpoint ends."""
        return 0 if self.resume is None else self.resume.head.step


@dataclass(frozen=True)
class TrainJob:
    """A training, ready to start.

    Attributes:
        what: the model, its data and its loss.
        how: the optimizer, the steps, and checkpoints.
        where: which rank does which part.
        meta: information about the run, of JSON types, for the trace.
    """

    what: Problem
    how: Procedure
    where: ResolvedPlan
    meta: dict[str, Any]

    @property
    def plan(self) -> Plan:
        """The plan that was asked for."""
        return self.where.plan

    def for_place(self, place: int) -> TrainJob:
        """Return the job as a rank at this place along tp sees it."""
        return replace(self, where=self.where.for_place(place))

    def without_proof(self, why: str) -> TrainJob:
        """Return the same job, of which no step is compared with serial training, and why."""
        return replace(self, how=replace(self.how, verified=(), unverified=self.how.unverified or why))

    def with_model(self, model: nn.Module) -> TrainJob:
        """Return the same job for another copy of the model."""
        return replace(self, what=replace(self.what, model=model))

    def for_evaluation(self) -> TrainJob:
        """Return the same job on the data for evaluation, of which each step is a batch."""
        assert self.how.evaluation is not None
        batches = self.how.evaluation.batches
        how = replace(self.how, steps=len(batches), resume=None, saving=None)
        return replace(self, what=replace(self.what, batches=batches), how=how)

    def with_loss(self, loss: Callable[[Any, Any], Tensor]) -> TrainJob:
        """Return the same job with another loss."""
        return replace(self, what=replace(self.what, loss=loss))


@dataclass(frozen=True)
class EvaluationData:
    """What is evaluated, and when.

    Attributes:
        batches: each of them is evaluated, once.
        metric: metric(outputs, targets) -> a mean over samples, (total, count), or a dict of these; or None.
        names: the names of what is measured, the loss first.
        every: steps from one evaluation to the next; the last step is followed by one too.
    """

    batches: WholeBatches | Batches
    metric: Callable[[Any, Any], Any] | None
    names: tuple[str, ...]
    every: int


def due(evaluation: EvaluationData | None, step: int, steps: int) -> bool:
    """Return whether a step is followed by an evaluation."""
    return evaluation is not None and ((step + 1) % evaluation.every == 0 or step + 1 == steps)

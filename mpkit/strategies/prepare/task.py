"""TrainOptions, the arguments besides model, data and plan; Task, what is to be trained as the checks see it; and
Rejection, why it cannot be.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Required, TypedDict

import torch
from torch import nn

from mpkit.strategies.data.batches import Batches
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.job.feed import WholeBatches
from mpkit.strategies.loss.counted import Quotient

__all__ = ["LossForm", "OptimizerTraits", "Rejection", "Task", "TrainOptions", "raise_rejection"]


Loss = Callable[[Any, Any], Any]


class Rejection(ValueError):
    """Why a training cannot be done: what was asked, why it cannot be, and what would work.

    The user sees its message in a ValueError.
    """


def raise_rejection(rejection: Rejection | None) -> None:
    """Raise a rejection's message as a ValueError; None is no rejection.

    Raises:
        ValueError: there is a rejection.
    """
    if rejection is not None:
        raise ValueError(str(rejection)) from None


@dataclass(frozen=True)
class OptimizerTraits:
    """What is known about an optimizer before the ranks start.

    Attributes:
        kind: the name of its class.
        states: the names of its states; empty if no checkpoint needs them.
        whole: whether ZeRO-1 gives each parameter whole to one rank, since it may change an element by the others.
    """

    kind: str = ""
    states: tuple[str, ...] = ()
    whole: bool = False


class LossForm(NamedTuple):
    """The loss that is trained.

    Attributes:
        loss: the loss as a rank calls it.
        nominal: as in `Problem`.
    """

    loss: Loss
    nominal: float | None


@dataclass
class Task:
    """What is to be trained.

    Attributes:
        model: on the CPU, as it is sent to the ranks.
        given_model: the same model as the user has it.
        batches: what each step takes.
        sizes: a batch of every size that occurs.
        loss: the loss as it was given, with totals divided by counts.
        given_loss: the loss as it was given.
        optimizer: optimizer(params) -> torch.optim.Optimizer.
        scheduled: whether there is an lr_schedule.
        saves: whether checkpoints are saved or resumed from.
        form: the loss as ranks call it; None before it is resolved.
    """

    model: nn.Module
    given_model: nn.Module
    batches: WholeBatches | Batches
    sizes: list[tuple[Value, Value]]
    loss: Quotient
    given_loss: Loss
    optimizer: Callable[[Any], Any]
    scheduled: bool = False
    saves: bool = False
    form: LossForm | None = None

    @property
    def batch(self) -> tuple[Value, Value]:
        """The first batch: inputs and targets."""
        return self.sizes[0]


class TrainOptions(TypedDict, total=False):
    """Keyword arguments of `Cluster.train`, which documents them in full.

    Attributes:
        loss: loss(outputs, targets) -> scalar, the mean over the batch, or (total, count).
        optimizer: optimizer(params) -> torch.optim.Optimizer, for all trained parameters.
        steps: the number of steps; step i takes data[i % len(data)].
        seed: the seed of the ranks' random state; 0 by default.
        max_grad_norm: the global norm to which gradients are clipped; None: no clipping.
        lr_schedule: lr_schedule(i) -> the factor of the learning rate in step i; None: 1.
        checkpoint_every: steps from one checkpoint to the next; None: save none.
        checkpoint_dir: the folder for checkpoints.
        checkpoint_keep: how many of the newest checkpoints to keep; 2 by default.
        resume_from: a checkpoint, or a folder of checkpoints, of which the newest complete one is used.
        on_step: on_step(context, step), called on every rank after each step.
        evaluate: data to evaluate on in between, or (data, metric).
        every: steps from one evaluation to the next; None: 1.
        ema: decay of the weights' moving average; None: none is kept.
        verify: the steps that are compared with serial training; none by default.
    """

    loss: Required[Callable[[Any, Any], torch.Tensor]]
    optimizer: Required[Callable[[Any], torch.optim.Optimizer]]
    steps: Required[int]
    seed: int
    max_grad_norm: float | None
    lr_schedule: Callable[[int], float] | None
    checkpoint_every: int | None
    checkpoint_dir: str | os.PathLike[str] | None
    checkpoint_keep: int
    resume_from: str | os.PathLike[str] | None
    on_step: Callable[[Any, int], Any] | None
    evaluate: Any
    every: int | None
    ema: float | None
    verify: Any

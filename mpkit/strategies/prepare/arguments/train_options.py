"""TrainOptions: the arguments of a training besides model, data and plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Required, TypedDict

import torch

__all__ = ["TrainOptions"]


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

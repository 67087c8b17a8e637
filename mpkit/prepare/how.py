"""How: what is said of a training besides model, data and plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Required, TypedDict

import torch

__all__ = ["How"]


class How(TypedDict, total=False):
    """Keywords of `Cluster.train`, which tells them in full.

    Attributes:
        loss: loss(outputs, targets) -> scalar, the mean over the batch, or (total, count).
        optimizer: optimizer(params) -> torch.optim.Optimizer, of all parameters that are trained.
        steps: how many; step i takes data[i % len(data)].
        seed: of the ranks' random state; 0 if it is left out.
        max_grad_norm: gradients are clipped to this norm, all together; None: they are not.
        lr_schedule: what the learning rate is multiplied by in step i; None: 1.
        checkpoint_every: steps from one checkpoint to the next; None: none are saved.
        checkpoint_dir: the folder that they are saved in.
        checkpoint_keep: how many of the newest stay; 2 if it is left out.
        resume_from: a checkpoint, or a folder of checkpoints: its newest whole one.
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

"""The explorer's run button: a schedule trains a model on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mpkit.launch.session.cluster import Cluster
from mpkit.strategies.data.datasets import text_batches
from mpkit.strategies.models import GPT, next_token_loss

if TYPE_CHECKING:
    from mpkit.launch.session.run import Run

__all__ = ["train"]


def train(
    plan: Any,
    model: torch.nn.Module | None = None,
    data: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> Run:
    """Train a model for three steps with a plan, and wait; by default a small GPT on text.

    Args:
        plan: the Plan; its ranks are started for this run.
        model, data, loss, optimizer: as in `Cluster.train`.
    """
    if model is None:
        torch.manual_seed(0)
        model = GPT(layers=max(plan.stages - 2, 1), width=64, length=32)
    if data is None:
        data = text_batches(batch=max(2 * plan.microbatches, 8), length=32, steps=3)
    with Cluster(plan.ranks) as cluster:
        return cluster.train(
            model,
            data,
            plan,
            loss=loss or next_token_loss,
            optimizer=optimizer or _sgd,
            steps=3,
            show=False,
        ).wait()


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)

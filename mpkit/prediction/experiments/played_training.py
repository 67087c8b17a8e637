"""A training that can be played with any plan: what `mk.profile` and `Run.what_if` count actions of.

empty     the model and a batch, without content: a copy that takes no memory worth mentioning
play      a plan's own code on them (`mk.trace_fake`), for so many samples of the batch and so many steps
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from mpkit.launch.session.cluster import Cluster
from mpkit.plan.plan import Plan
from mpkit.prediction.dry_run.trace import trace_fake
from mpkit.strategies.data.microbatch import map_tensors
from mpkit.trace import Trace

if TYPE_CHECKING:
    import torch

__all__ = ["PlayedTraining", "first_samples"]


class PlayedTraining:
    """A model, a batch, a loss and an optimizer, played on the assumed core of "cpu".

    Args:
        model: any model; it is copied.
        batch: (inputs, targets), of which the shapes are kept.
        loss, optimizer, max_grad_norm: as for `Cluster.train`.
    """

    def __init__(
        self, model: torch.nn.Module, batch: tuple[Any, Any], *, loss: Callable[[Any, Any], torch.Tensor],
        optimizer: Callable[[Any], torch.optim.Optimizer], max_grad_norm: float | None = None,
    ) -> None:  # fmt: skip
        self._empty = deepcopy(model).to("meta")
        self._batch = _without_content(batch)
        self._loss, self._optimizer, self._max_grad_norm = loss, optimizer, max_grad_norm

    def trace(
        self, plan: Plan, *, samples: int | None = None, steps: int = 1, cluster: Cluster | None = None
    ) -> Trace:
        """Play a plan.

        Args:
            plan: any plan.
            samples: play only as many samples of the batch; None: all.
            steps: the number of steps.
            cluster: any cluster, whose helper process to use; None: start one.

        Raises:
            ValueError: the plan does not fit the model or the batch.
        """
        empty, batch = self._empty, self._batch

        def make_model() -> torch.nn.Module:
            return deepcopy(empty).to_empty(device="cpu")

        return trace_fake(
            make_model, plan, batch=batch if samples is None else first_samples(samples, batch), loss=self._loss,
            optimizer=self._optimizer, steps=steps, hardware="cpu", max_grad_norm=self._max_grad_norm,
            cluster=cluster,
        )  # fmt: skip


def first_samples(samples: int, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first samples of a batch."""
    return tuple(map_tensors(lambda t: t[:samples], value) for value in batch)


def _without_content(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    import torch

    return tuple(map_tensors(lambda t: torch.empty_like(t, device="meta"), value) for value in batch)

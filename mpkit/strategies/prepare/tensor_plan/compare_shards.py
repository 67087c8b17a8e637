"""Check that a model divided over a tensor-parallel group computes the same as the whole model.

A TensorPlan says which layers are divided, but not what the model's forward does between them: a slice of a fused
projection, a residual added inside a region, or heads counted by another attribute would give different numbers without
an error. So the first samples go through the whole model, and then through its shards, each in a thread of its own that
stands for a rank; loss and gradients must be the same.

    copies    in float64 if the model computes in it, otherwise in its own precision; with some noise on each weight, so
              that zeros hide nothing; without dropout
    threads   t of them, whose collectives meet at a barrier
    compare   the loss; gradients of shards concatenated, partial sums summed, all others equal on each rank
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpkit.common.exceptions import one_line, report
from mpkit.plan.plan import Plan
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.prepare.tensor_plan.thread_group import TensorExchange, ThreadGroup
from mpkit.strategies.prepare.tensor_plan.whole_model import (
    Gradients,
    WholeModel,
    compute_whole,
    train,
    unknown,
)
from mpkit.strategies.stage.shard import ShardedModel, put_together
from mpkit.strategies.tensor import shard_model

__all__ = ["check_tensor_plan"]

Loss = Callable[[Any, Any], Any]

LARGEST = 50_000_000
"""Elements of the largest model that is checked: its float64 copies fit into memory and compute in a moment."""


def check_tensor_plan(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject a TensorPlan with which the model, divided over ranks, would compute something else.

    The message names the parameter whose gradient differs most. The kit's own models, and models whose parameters have
    no content, are not checked.
    """
    plan, model, loss = resolved.plan, task.model, task.loss
    sizes = [parameter.numel() for parameter in model.parameters()]
    own = type(model).__module__.startswith("mpkit.strategies.models.") and plan.tensor is None
    if plan.tp == 1 or own or sum(sizes) > LARGEST or not _has_content(model):
        return None
    whole = compute_whole(model, task.batch, plan.tp, loss)
    if not all(bool(grad.isfinite().all()) for grad in whole.gradients.values() if grad is not None):
        report(unknown(model, plan.tp, "the loss or a gradient of the whole model is not finite"))
        return None
    shards = _ShardGradients(whole, plan, loss)
    gradients = shards.combine()
    errors = {name: whole.error(name, grad) for name, grad in gradients.items()}
    if max(errors.values()) <= whole.close:
        return None
    if not whole.repeats(loss):
        report(unknown(model, plan.tp, "the whole model computes another loss or gradient each time"))
        return None
    # A mistake within a region also shows in the layers before it: the message names the region.
    inside = {n: r.entry for r in shards.plan_regions for n in errors if n.startswith(f"{r.entry}.")}
    wrong = [name for name in inside if errors[name] > whole.close] or list(errors)
    name = max(wrong, key=errors.__getitem__)
    region, worst = inside.get(name), errors[name]
    return Rejection(
        f"Plan(tp={plan.tp}): divided by its TensorPlan, {type(model).__name__} does not compute what it computes "
        f"whole: {'the loss' if not name else 'the gradient of ' + name} differs by {worst:.0%}"
        + (f", in Region(entry={region!r})" if region is not None else "")
        + ". Between column and row layers a forward may treat features or heads one by one only: fused projections "
        "take sections=(1, 1, 1), attributes that count heads local=('num_heads',), arguments that are added after the "
        "row layer apart=('residual',). mk.tensor.find_tensor_plan(model) is the plan to begin with; "
        "leave this region out, or train with tp=1."
    )


class _ShardGradients:
    """Computes the gradients of the shards and combines them."""

    def __init__(self, whole: WholeModel, plan: Plan, loss: Loss) -> None:
        self._plan, self._whole = plan, whole.model
        self._batch = whole.x, whole.y, loss
        self._exchange = TensorExchange(plan.tp)
        self._found: dict[int, tuple[ShardedModel, Gradients]] = {}
        self._errors: list[Exception] = []

    def combine(self) -> Gradients:
        """Return the gradients by name, with the loss under the name ""."""
        threads = [threading.Thread(target=self._rank, args=(i,)) for i in range(self._plan.tp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise Rejection(
                f"Plan(tp={self._plan.tp}): {type(self._whole).__name__}, divided by its TensorPlan, refuses the "
                f"data: {one_line(self._errors[0])}"
            )
        if len(self._found) < self._plan.tp:
            raise Rejection(
                f"Plan(tp={self._plan.tp}): {type(self._whole).__name__}, divided by its TensorPlan, would go another "
                "way on each rank, and they would wait for each other: what of its forward depends on values has to be "
                "the same on all. Leave those layers out of the TensorPlan, or train with tp=1."
            )
        shards = [self._found[i] for i in range(self._plan.tp)]
        sharded = shards[0][0]
        self.plan_regions = sharded.plan.regions
        summed: Gradients = {}
        for name in shards[0][1]:
            parts = [gradients[name] for _, gradients in shards]
            known = [grad for grad in parts if grad is not None]
            if len(known) < len(parts):
                summed[name] = sum(known) if known else None  # type: ignore[assignment]
            elif name in sharded.shards:
                summed[name] = put_together([one.shards[name] for one, _ in shards], known)
            elif name in sharded.partial:
                summed[name] = torch.stack(known).sum(0)
            else:  # equal on each rank: take the one farthest from the first
                summed[name] = max(known, key=lambda grad: float((grad - known[0]).norm()))
        return summed

    def _rank(self, index: int) -> None:
        try:
            model, plan = copy.deepcopy(self._whole), self._plan
            model.zero_grad()
            sharded = shard_model(
                model, ThreadGroup(self._exchange, index), plan.tensor, sequence=plan.sequence_parallel
            )
            x, y, loss = self._batch
            self._found[index] = sharded, train(model, x, y, loss)
        except threading.BrokenBarrierError:
            pass  # another rank has failed
        except Exception as error:
            self._errors.append(error)
            self._exchange.barrier.abort()


def _has_content(model: nn.Module) -> bool:
    return all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())

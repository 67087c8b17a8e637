"""Decides which loss a training uses, after the given one was tried."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpkit.plan.plan import Plan
from mpkit.strategies.data.microbatch import Value, batch_size, leaves
from mpkit.strategies.job.resolved import ResolvedPlan
from mpkit.strategies.loss.mean import MeanLoss
from mpkit.strategies.loss.quotient import Quotient, nominal_count
from mpkit.strategies.loss.whole_batch import WholeBatchLoss
from mpkit.strategies.prepare.probe.probe import Loss, Probe, ProbedLoss, in_one_part

__all__ = ["ProbedLoss", "objective"]


def objective(
    model: nn.Module,
    loss: Loss,
    batches: Any,
    first: tuple[Value, Value],
    resolved: ResolvedPlan,
    *,
    pairs: bool,
) -> ProbedLoss:
    """Try model and loss, and determine how the loss of a batch is combined from its parts.

    Args:
        model, loss: the model and loss of the training.
        batches: its data; `first`: its first batch.
        resolved: the plan, which determines the parts, and its FLOPs, which determine how many samples are tried.
        pairs: whether the loss returned (total, count) in the dry run.

    Raises:
        ValueError: the parts of a batch do not add up to it.
    """
    plan = resolved.plan
    check_whole_batch(loss, plan)
    counts = pairs or isinstance(loss, MeanLoss)
    if in_one_part(plan):
        loss = loss.mean if isinstance(loss, MeanLoss) else Quotient(loss) if pairs else loss
        counts = False
    plain = ProbedLoss(loss, nominal_count(batch_size(first[0])) if counts else None)
    if (in_one_part(plan) and plan.dp == 1) or _without_content(model, first):
        return plain
    return Probe(model, loss, batches, first, plan, resolved.flops_of_a_sample(), plain).verdict()


def check_whole_batch(loss: Any, plan: Plan) -> None:
    """Check that a loss of the whole batch can see all of it.

    Raises:
        ValueError: the plan has several micro-batches, or divides sequences.
    """
    if not isinstance(loss, WholeBatchLoss):
        return
    if plan.microbatches > 1:
        raise ValueError(
            f"{plan}: mk.whole_batch_loss needs all samples at once, and of {plan.microbatches} micro-batches the "
            "first ones are over before the last one begins: microbatches=1 in the Plan (schedule='naive')."
        )
    if plan.cp > 1:
        raise ValueError(
            f"{plan}: mk.whole_batch_loss gathers samples, and with cp={plan.cp} each rank has a part of every "
            f"sequence: cp=1, as in mk.Plan.ddp({plan.ranks})."
        )


def _without_content(model: nn.Module, first: tuple[Value, Value]) -> bool:
    tensors = [*model.parameters(), *model.buffers(), *leaves(first[0]), *leaves(first[1])]
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None or any(
        tensor.is_meta for tensor in tensors
    )

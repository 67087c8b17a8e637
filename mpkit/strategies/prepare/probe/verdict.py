"""Decides whether the parts of a batch add up to it, and which loss the ranks call."""

from __future__ import annotations

from mpkit.strategies.data.microbatch import batch_size
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.loss.mean import MeanLoss
from mpkit.strategies.loss.quotient import Quotient, nominal_count
from mpkit.strategies.loss.whole_batch import WholeBatchLoss
from mpkit.strategies.prepare.arguments.task import ProbedLoss, Rejection, Task
from mpkit.strategies.prepare.dry_run.copies import has_content
from mpkit.strategies.prepare.probe.probe import Probe

__all__ = ["check_parts", "check_whole_batch_loss"]


def check_parts(resolved: ResolvedPlan, task: Task) -> None:
    """Reject losses and layers with which the parts of a batch do not add up to the batch.

    Micro-batches and replicas each compute a part, and their results are combined. A loss that compares samples or
    sums over them, or a layer that mixes them, makes something else of the parts. What the ranks call as the loss,
    `task.probed` has from then on.

    Raises:
        Rejection: the parts of a batch do not add up to it.
    """
    loss, at_once = task.given_loss, resolved.computes_loss_at_once
    pairs = task.loss.count is not None  # it returned (total, count) in the dry run
    counts = not at_once and (pairs or isinstance(loss, MeanLoss))
    if at_once:
        loss = loss.mean if isinstance(loss, MeanLoss) else Quotient(loss) if pairs else loss
    plain = ProbedLoss(loss, nominal_count(batch_size(task.batch[0])) if counts else None)
    if (at_once and resolved.plan.dp == 1) or not has_content(task.model, task.batch):
        task.probed = plain
    else:
        task.probed = Probe(resolved, task, plain).verdict()


def check_whole_batch_loss(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject losses of the whole batch where a rank does not see all of it at once."""
    plan = resolved.plan
    if not isinstance(task.given_loss, WholeBatchLoss):
        return None
    if plan.microbatches > 1:
        return Rejection(
            f"{plan}: mk.whole_batch_loss needs all samples at once, and of {plan.microbatches} micro-batches the "
            "first ones are over before the last one begins: microbatches=1 in the Plan (schedule='naive')."
        )
    if plan.cp > 1:
        return Rejection(
            f"{plan}: mk.whole_batch_loss gathers samples, and with cp={plan.cp} each rank has a part of every "
            f"sequence: cp=1, as in mk.Plan.ddp({plan.ranks})."
        )
    return None

"""Check of experts whose routing depends on the whole batch: ranks have to know in time what they need of it.

replicas         ranks of nn.DataParallel know nothing of each other
auxiliary loss   a layer's backwards need the rows of all its forwards
capacity         a forward needs the rows of those before it, and where in the batch its tokens are
both losses      their gradients are those of a mean over tokens, and so has to be the loss of the outputs
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from mpkit.plan.checks import call_of
from mpkit.plan.schedule import Schedule
from mpkit.plan.schedule.catalogue import GPIPE
from mpkit.strategies.context.sequence import pieces
from mpkit.strategies.data.microbatch import leaves
from mpkit.strategies.experts.known_experts import find_balanced
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.models.experts import MixtureOfExperts
from mpkit.strategies.prepare.arguments.task import Rejection, Task

__all__ = ["check_balanced_routing"]


def check_balanced_routing(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject plans under which an expert's capacity or a router's losses would not be those of the whole batch."""
    for name, layer in find_balanced(task.model).items():
        for why, works in _obstacles(layer, resolved, task):
            given = ", ".join(f"{key}={value}" for key, value in layer.balance_options.items())
            return Rejection(
                f"{resolved.plan}: {name or 'the layer'} has {given}, and {why}. What works: {works}"
            )
    return None


def _obstacles(layer: MixtureOfExperts, resolved: ResolvedPlan, task: Task) -> Iterator[tuple[str, str]]:
    """Yield why a layer cannot be trained under a plan, and a plan under which it can."""
    plan, schedule = resolved.plan, resolved.schedule
    all_forward = {"schedule": GPIPE, "virtual_stages": 1} if plan.pp > 1 else {"microbatches": 1}
    if plan.dp > 1 and plan.data_parallel == "dp":
        yield "nn.DataParallel's replicas know nothing of each other", call_of(plan, {"data_parallel": "ddp"})
    # ---- auxiliary loss
    if layer.aux_loss and not _has_forwards_first(schedule):
        yield (
            f"an auxiliary loss counts the rows of the whole batch, but backwards begin before the last forward of "
            f"{plan.microbatches} micro-batches",
            call_of(plan, all_forward),
        )
    # ---- capacity
    if layer.capacity is not None:
        first = "experts with a capacity take the first rows of the batch, but "
        if not _has_forwards_in_order(schedule):
            yield f"{first}forwards are in another order than micro-batches", call_of(plan, all_forward)
        if plan.sequence_parallel and plan.tp > 1 and not _cuts_pieces(resolved, task):
            yield (
                f"{first}tp={plan.tp} ranks cannot cut a piece of a sequence into equal parts",
                call_of(plan, {"sequence_parallel": False}),
            )
    # ---- both losses
    counts = task.form is not None and task.form.nominal is not None
    if counts and (layer.aux_loss or layer.z_loss):
        yield (
            "the gradients of a router's losses are those of a mean over tokens, but those of the outputs' loss "
            "(total, count) are divided by a count that is known after the last forward",
            "Plan.serial()",
        )


def _has_forwards_first(schedule: Schedule) -> bool:
    """Return whether each stage begins its backwards after all its forwards."""
    for row in schedule.rows:
        backward = {
            action.stage: i for i, action in reversed(list(enumerate(row))) if action.kind in ("B", "I")
        }
        if any(action.kind == "F" and i > backward[action.stage] for i, action in enumerate(row)):
            return False
    return True


def _has_forwards_in_order(schedule: Schedule) -> bool:
    """Return whether each stage's forwards are in the order of the micro-batches."""
    forwards = {s: [a.microbatch for a in row if a.kind == "F" and a.stage == s]
                for p, row in enumerate(schedule.rows) for s in schedule.stages_of(p)}  # fmt: skip
    return all(a < b for order in forwards.values() for a, b in pairwise(order))


def _cuts_pieces(resolved: ResolvedPlan, task: Task) -> bool:
    """Return whether ranks along tp can cut each piece of all sequences into equal parts."""
    plan = resolved.plan
    parts = plan.cp * len(pieces(0, plan.cp, plan.cp_order)) * plan.tp
    shapes = [leaves(inputs)[0].shape for inputs, _ in task.sizes]
    return all(len(shape) > 1 and shape[1] % parts == 0 for shape in shapes)

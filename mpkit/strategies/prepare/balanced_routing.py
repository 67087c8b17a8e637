"""Check of experts whose routing depends on the whole batch: ranks have to know in time what they need of it.

replicas         ranks of nn.DataParallel know nothing of each other
auxiliary loss   a layer's backwards need the rows of all its forwards
capacity         the first rows of the batch are an expert's: one forward has to see them all
both losses      their gradients are those of a mean over tokens, and so has to be the loss of the outputs
"""

from __future__ import annotations

from collections.abc import Iterator

from mpkit.plan.rules import call_of
from mpkit.plan.schedule import Schedule
from mpkit.plan.schedule.catalogue import GPIPE
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
    own_tokens = plan.sequence_parallel and plan.tp > 1
    if layer.capacity is not None and (plan.dp * plan.cp * plan.microbatches > 1 or own_tokens):
        whole = {
            "dp": 1,
            "cp": 1,
            "microbatches": 1,
            "zero": 0,
            "ep": 1,
            "etp": None,
            "sequence_parallel": False,
        }
        fewer = {"schedule": GPIPE, "virtual_stages": 1} if plan.pp > 1 else {}
        defaults = {"dp_shard": None, "dp_replicate": None, "offload": "none", "cp_method": "ring"}
        yield (
            "which rows an expert with a capacity takes depends on all tokens of the batch, which this plan divides",
            call_of(plan, whole | fewer | defaults),
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

"""Checks of recomputation: that it recomputes something."""

from __future__ import annotations

from torch import nn

from mpkit.plan.rules import call_of
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.models.blocks import repeated_blocks
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.stage.recompute import chosen_blocks

__all__ = ["check_recomputed_blocks", "count_recomputed"]


def count_recomputed(model: nn.Module, recompute: str) -> tuple[int, int]:
    """Return how many of a model's repeated blocks are recomputed, and how many blocks there are."""
    blocks = repeated_blocks(model)
    return len(chosen_blocks(recompute, blocks)), len(blocks)


def check_recomputed_blocks(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject the recomputation of every k-th block of a model that has fewer than k."""
    plan, blocks = resolved.plan, repeated_blocks(task.model)
    if plan.recompute.startswith("every=") and not chosen_blocks(plan.recompute, blocks):
        have = f"has {len(blocks)}" if blocks else "has none that mpkit.models.repeated_blocks finds"
        instead = {"recompute": "every=2" if len(blocks) > 1 else "full"}
        return Rejection(
            f"Plan(recompute={plan.recompute!r}) recomputes one of so many repeated blocks, and "
            f"{type(task.model).__name__} {have}: nothing would be recomputed. Write {call_of(plan, instead)}"
        )
    return None

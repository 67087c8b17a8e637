"""What a plan's recomputation means for a model."""

from __future__ import annotations

from torch import nn

from mpkit.models.blocks import repeated_blocks
from mpkit.parallel.block_recompute import chosen_blocks
from mpkit.plan import Plan
from mpkit.plan_checks import call_of

__all__ = ["check_recompute"]


def check_recompute(model: nn.Module, plan: Plan) -> tuple[int, int]:
    """How many of a model's repeated blocks are recomputed, and of how many.

    Raises:
        ValueError: the plan asks for every k-th block, and there are not that many.
    """
    blocks = repeated_blocks(model)
    chosen = chosen_blocks(plan.recompute, blocks)
    if plan.recompute.startswith("every=") and not chosen:
        have = f"has {len(blocks)}" if blocks else "has none that mpkit.models.repeated_blocks finds"
        instead = {"recompute": "every=2" if len(blocks) > 1 else "full"}
        raise ValueError(
            f"Plan(recompute={plan.recompute!r}) recomputes one of so many repeated blocks, and "
            f"{type(model).__name__} {have}: nothing would be recomputed. Write {call_of(plan, instead)}"
        )
    return len(chosen), len(blocks)

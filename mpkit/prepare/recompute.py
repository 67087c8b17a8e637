"""What a plan's recomputation means for a model."""

from __future__ import annotations

from torch import nn

from mpkit.models.blocks import repeated_blocks
from mpkit.parallel.block_recompute import chosen_blocks
from mpkit.parallel.microbatch import Value
from mpkit.plan import Plan
from mpkit.plan_checks import call_of
from mpkit.prepare.attentions import keys_and_values

__all__ = ["check_recompute", "recomputes_nothing"]


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


def recomputes_nothing(model: nn.Module, inputs: Value, plan: Plan) -> str:
    """Return what to warn of where a plan recomputes attentions and the model calls none; else nothing.

    Args:
        model: whole, on the CPU; left as it is.
        inputs: a batch.
        plan: of the training.
    """
    if plan.recompute != "selective":
        return ""
    everything = [[name for name, _ in model.named_parameters()]]
    if sum(keys_and_values(model, inputs, everything)):
        return ""
    eager = ', or attn_implementation="sdpa" for a model of transformers' * hasattr(model, "config")
    return (
        f"{plan}: recompute='selective' computes calls of torch.nn.functional.scaled_dot_product_attention again, and "
        f"{type(model).__name__} makes none: nothing is recomputed, and all activations are kept. Write "
        f"{call_of(plan, {'recompute': 'full'})}{eager}"
    )

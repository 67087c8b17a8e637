"""Checks what a plan's recomputation means for a model."""

from __future__ import annotations

from torch import nn

from mpkit.plan.checks import call_of
from mpkit.plan.plan import Plan
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.models.blocks import repeated_blocks
from mpkit.strategies.prepare.layout.attentions import attention_sizes
from mpkit.strategies.stage.block_recompute import chosen_blocks

__all__ = ["check_recompute", "recomputes_nothing"]


def check_recompute(model: nn.Module, plan: Plan) -> tuple[int, int]:
    """Return how many of a model's repeated blocks are recomputed, and how many blocks there are.

    Raises:
        ValueError: the plan recomputes every k-th block, and there are fewer than k.
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
    """Return a warning if a plan recomputes attentions and the model calls none; otherwise "".

    Args:
        model: the whole model, on the CPU; it is not changed.
        inputs: the inputs of a batch.
        plan: the plan of the training.
    """
    if plan.recompute != "selective":
        return ""
    everything = [[name for name, _ in model.named_parameters()]]
    if sum(attention_sizes(model, inputs, everything)[0]):
        return ""
    eager = ', or attn_implementation="sdpa" for a model of transformers' * hasattr(model, "config")
    return (
        f"{plan}: recompute='selective' computes calls of torch.nn.functional.scaled_dot_product_attention again, and "
        f"{type(model).__name__} makes none: nothing is recomputed, and all activations are kept. Write "
        f"{call_of(plan, {'recompute': 'full'})}{eager}"
    )

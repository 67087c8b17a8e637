"""Warn at the user's line, with an `UnwisePlan`, of plans whose features work against each other or do nothing."""

from __future__ import annotations

from torch import nn

from mpkit.common.exceptions import report
from mpkit.plan.plan import Plan
from mpkit.plan.rules import call_of
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.models.chain import repeated_blocks
from mpkit.strategies.stage.recompute import chosen_blocks

__all__ = ["count_recomputed", "warn_if_nothing_recomputed", "warn_if_unwise"]


def warn_if_unwise(plan: Plan) -> None:
    """Warn if a plan sends more than an equivalent one, and say what that costs.

    ZeRO-2 and -3 free gradients and parameters after each backward, and a pipeline has m backwards per step, so the
    volume sent grows with m. Rajbhandari et al. 2020, section 7.2, count one backward.
    """
    m = plan.microbatches
    if plan.pp == 1 or plan.dp * plan.cp == 1 or plan.zero < 2 or m == 1:
        return
    why = {
        2: f"reduces the gradients after each micro-batch's backward, (m + 1) psi per step with m = {m}",
        3: f"gathers the parameters for each micro-batch's forward and backward and reduces the gradients after, "
        f"3 m psi per step with m = {m}",
    }[plan.zero]
    report(
        f"{plan}: in a pipeline ZeRO-{plan.zero} {why}, where ZeRO-1 sends 2 psi. "
        f"Unless memory forces you, {call_of(plan, {'zero': 1})}"
    )


def count_recomputed(model: nn.Module, recompute: str) -> tuple[int, int]:
    """Return how many of a model's repeated blocks are recomputed, and how many blocks there are."""
    blocks = repeated_blocks(model)
    return len(chosen_blocks(recompute, blocks)), len(blocks)


def warn_if_nothing_recomputed(resolved: ResolvedPlan, model: nn.Module) -> None:
    """Warn if a plan recomputes attentions and the model calls none, or every k-th block and it has fewer than k."""
    plan, kind = resolved.plan, type(model).__name__
    if plan.recompute.startswith("every="):
        recomputed, blocks = count_recomputed(model, plan.recompute)
        if not recomputed:
            have = f"has {blocks}" if blocks else "has none that mpkit.models.repeated_blocks finds"
            report(
                f"{plan}: one of so many repeated blocks is computed again, and {kind} {have}: nothing is recomputed, "
                f"and all activations are kept. Write "
                f"{call_of(plan, {'recompute': 'every=2' if blocks > 1 else 'full'})}"
            )
    elif plan.recompute == "selective" and plan.cp == 1 and not _calls_attention(resolved):
        eager = ', or attn_implementation="sdpa" for a model of transformers\'' * hasattr(model, "config")
        report(
            f"{plan}: recompute='selective' computes calls of torch.nn.functional.scaled_dot_product_attention again, "
            f"and {kind} makes none: nothing is recomputed, and all activations are kept. Write "
            f"{call_of(plan, {'recompute': 'full'})}{eager}"
        )


def _calls_attention(resolved: ResolvedPlan) -> bool:
    """Return whether a micro-batch was seen to go through an attention, or nothing is known."""
    key = next(iter(resolved.numbers))
    stages = [resolved.flops(key, stage) for stage in range(len(resolved.stages))]
    return any(flops.why or flops.attention[1] for flops in stages)

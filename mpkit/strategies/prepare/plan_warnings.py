"""Warn at the user's line, with an `UnwisePlan`, of plans whose features work against each other or do nothing."""

from __future__ import annotations

from mpkit.common.exceptions import report
from mpkit.plan.plan import Plan
from mpkit.plan.rules import call_of
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.prepare.arguments.task import Task
from mpkit.strategies.prepare.resolve.attentions import attention_sizes

__all__ = ["warn_if_nothing_recomputed", "warn_if_unwise"]


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


def warn_if_nothing_recomputed(resolved: ResolvedPlan, task: Task) -> None:
    """Warn if a plan recomputes attentions and the model calls none."""
    plan, model = resolved.plan, task.model
    if plan.recompute != "selective":
        return
    everything = [[name for name, _ in model.named_parameters()]]
    if sum(attention_sizes(model, task.batch[0], everything)[0]):
        return
    eager = ', or attn_implementation="sdpa" for a model of transformers' * hasattr(model, "config")
    report(
        f"{plan}: recompute='selective' computes calls of torch.nn.functional.scaled_dot_product_attention again, and "
        f"{type(model).__name__} makes none: nothing is recomputed, and all activations are kept. Write "
        f"{call_of(plan, {'recompute': 'full'})}{eager}"
    )

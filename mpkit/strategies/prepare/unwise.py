"""Warns of plans that send more than an equivalent one, with the reason and the volumes."""

from __future__ import annotations

from mpkit.common.caught import report
from mpkit.plan.checks import call_of
from mpkit.plan.plan import Plan

__all__ = ["warn_if_unwise"]


def warn_if_unwise(plan: Plan) -> None:
    """Warn at the user's line, with an `UnwisePlan`, if a plan's features work against each other; say what that costs.

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

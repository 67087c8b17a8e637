"""Plans that work, and cost more than another that does the same: a warning with the reason and the price."""

from __future__ import annotations

import warnings

from mpkit.errors import UnwisePlan
from mpkit.plan import Plan
from mpkit.plan_checks import call_of

__all__ = ["warn_if_unwise"]

MEASURED = {2: (1.15, 1.4), 3: (1.8, 2.9)}
"""The step under ZeRO-2 and -3, as a multiple of ZeRO-1's: of a GPT with h = 256 and 8 layers on 2 x 2 CPU ranks, 1F1B
with 8 micro-batches of 2 x 64 tokens; and of the same runs replayed on H100s with NVLink. More work a micro-batch makes
both smaller."""


def warn_if_unwise(plan: Plan) -> None:
    """Say what a plan costs that works against itself.

    ZeRO-2 and -3 let go of gradients and parameters after each backward, and a pipeline has m of these a step: what is
    sent grows with m. Rajbhandari et al. 2020, section 7.2, count one.
    """
    m = plan.microbatches
    if plan.pp == 1 or plan.dp * plan.cp == 1 or plan.zero < 2 or m == 1:
        return
    why = {
        2: f"reduces the gradients after each micro-batch's backward, (m + 1) psi a step with m = {m}",
        3: f"gathers the parameters for each micro-batch's forward and backward and reduces the gradients after, "
        f"3 m psi a step with m = {m}",
    }[plan.zero]
    here, replayed = MEASURED[plan.zero]
    warnings.warn(
        f"{plan}: in a pipeline ZeRO-{plan.zero} {why}, where ZeRO-1 sends 2 psi. Measured on 2 x 2 ranks with m = 8, "
        f"a step took {here} times ZeRO-1's, replayed on H100s with NVLink {replayed} times. Unless memory forces you, "
        f"{call_of(plan, {'zero': 1})}",
        UnwisePlan,
        stacklevel=4,
    )

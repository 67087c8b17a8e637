"""Checks of a Plan's `ep`: which ranks divide the experts. Every message shows a plan that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.plan.checks import call_of

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = ["check_experts"]


def check_experts(plan: Plan) -> None:
    """Check that ep divides the replicas, each of which has tokens of its own and trains by itself.

    Raises:
        ValueError: it does not.
    """
    if plan.ep == 1:
        return
    if plan.data_parallel == "dp":
        raise ValueError(
            f"{call_of(plan)}: nn.DataParallel copies the whole model from rank 0 to all others in each step, and so "
            f"divides no experts. DDP does: {call_of(plan, {'data_parallel': 'ddp'})}"
        )
    replicas = plan.shards
    if replicas % plan.ep:
        if replicas == 1:
            fits = {"dp": plan.ep}
        else:
            fits = {"ep": max(n for n in range(1, replicas + 1) if replicas % n == 0 and n <= plan.ep)}
        among = "dp_shard x cp" if plan.dp_shard else "dp x cp"
        raise ValueError(
            f"Plan(ep={plan.ep}): the ranks that divide the experts are some of the replicas, each with samples or "
            f"tokens of its own, and ep={plan.ep} does not divide {among} = {replicas}, such as "
            f"{call_of(plan, fits)}"
        )

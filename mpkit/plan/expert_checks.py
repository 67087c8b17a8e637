"""Checks of a Plan's `ep` and `etp`: which ranks divide the experts. Every message shows a plan that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.plan.checks import call_of, whole

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = ["check_experts"]


def check_experts(plan: Plan) -> None:
    """Check that ep divides the ranks that have tokens of their own: the replicas, with etp=1 also those along tp.

    Raises:
        ValueError: it does not.
    """
    _check_folding(plan)
    if plan.ep == 1:
        return
    if plan.data_parallel == "dp":
        raise ValueError(
            f"{call_of(plan)}: nn.DataParallel copies the whole model from rank 0 to all others in each step, and so "
            f"divides no experts. DDP does: {call_of(plan, {'data_parallel': 'ddp'})}"
        )
    replicas = plan.shards * (plan.tp if plan.etp == 1 else 1)
    if replicas % plan.ep:
        if replicas == 1:
            fits = {"dp": plan.ep}
        else:
            fits = {"ep": max(n for n in range(1, replicas + 1) if replicas % n == 0 and n <= plan.ep)}
        among = ("dp_shard x cp" if plan.dp_shard else "dp x cp") + " x tp" * (plan.etp == 1)
        raise ValueError(
            f"Plan(ep={plan.ep}): the ranks that divide the experts are some of the replicas, each with samples or "
            f"tokens of its own, and ep={plan.ep} does not divide {among} = {replicas}, such as "
            f"{call_of(plan, fits)}"
        )


def _check_folding(plan: Plan) -> None:
    """Check etp, and leave it out where it says nothing."""
    if plan.etp is None:
        return
    etp, without = whole(plan.etp), call_of(plan, {"etp": None})
    if etp not in (1, plan.tp):
        folded = {"etp": 1} | ({"sequence_parallel": True} if plan.tp > 1 else {})
        raise ValueError(
            f"Plan(etp={plan.etp!r}): the ranks along tp that share each expert: all {plan.tp} of them, "
            f"{call_of(plan, {'etp': plan.tp})}; or 1, each has whole ones, {call_of(plan, folded)}. Left out, the "
            f"ranks along tp hold the same experts: {without}"
        )
    if plan.ep == 1 or plan.tp == 1:  # nothing to fold, and tp divides what it knows
        object.__setattr__(plan, "etp", None)
        return
    if etp == plan.tp:
        return
    if not plan.sequence_parallel:
        raise ValueError(
            f"{call_of(plan)}: where the ranks along tp divide experts, each has tokens of its own, which Megatron "
            f"requires, too: {call_of(plan, {'sequence_parallel': True})}"
        )

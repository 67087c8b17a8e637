"""Checks of a Plan's `ep` and `etp`: which ranks divide the experts. Every message shows a plan that works.

Also which rank owns an expert that has slots on several, and to whom it lends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpkit.plan.checks import call_of, whole

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = ["check_experts", "lent_experts", "owned_experts"]


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


def owned_experts(order: Sequence[int], experts: int, n: int) -> list[tuple[int, ...]]:
    """Return the experts that each of n ranks owns, as many each: if possible, of those in its slots.

    >>> owned_experts([0, 0, 1, 0, 2, 3], 4, 2)
    [(0, 1), (2, 3)]

    Args:
        order: the expert of each slot; n divides their number.
        experts: how many the layer has; n divides it.
        n: the number of ranks.
    """
    here, slots = experts // n, len(order) // n
    if len(order) == experts:
        return [tuple(order[rank * here : (rank + 1) * here]) for rank in range(n)]
    holders: dict[int, set[int]] = {}
    for slot, expert in enumerate(order):
        holders.setdefault(expert, set()).add(slot // slots)
    owned: list[list[int]] = [[] for _ in range(n)]
    for expert in sorted(range(experts), key=lambda e: (len(holders[e]), e)):  # first those with few holders
        free = [rank for rank in range(n) if len(owned[rank]) < here]
        rank = min(holders[expert].intersection(free) or free, key=lambda r: (len(owned[r]), r))
        owned[rank].append(expert)
    return [tuple(sorted(each)) for each in owned]


def lent_experts(order: Sequence[int], experts: int, n: int) -> list[list[list[int]]]:
    """Return, by owner and borrower, the experts that one of n ranks lends to another, in the owner's order.

    >>> lent_experts([0, 0, 1, 0, 2, 3], 4, 2)  # the first rank lends expert 0
    [[[], [0]], [[], []]]

    Args:
        order, experts, n: as for `owned_experts`.
    """
    owned, slots = owned_experts(order, experts, n), len(order) // n
    held = [set(order[rank * slots : (rank + 1) * slots]) for rank in range(n)]
    return [
        [[e for e in owned[owner] if owner != rank and e in held[rank]] for rank in range(n)]
        for owner in range(n)
    ]

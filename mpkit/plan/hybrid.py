"""Hybrid sharding: a Plan's `dp_shard` and `dp_replicate`. Messages show plans that work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpkit.plan.checks import call_of, checked_degree, whole

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = ["change_plan", "check_hybrid", "take_hybrid_degrees"]


def take_hybrid_degrees(plan: Plan) -> None:
    """Set dp, dp_shard and dp_replicate, of which any two determine the third; both are None without hybrid sharding.

    Raises:
        ValueError: a degree is not a whole number, or dp is not the product of the other two.
    """
    given = [name for name in ("dp_shard", "dp_replicate") if getattr(plan, name) is not None]
    if not given:
        return
    degrees = {name: checked_degree(plan, name) for name in ("dp", *given)}
    dp, shard, replicate = degrees["dp"], degrees.get("dp_shard"), degrees.get("dp_replicate")
    if dp == 1:
        dp = (shard or 1) * (replicate or 1)
    shard = shard or max(dp // (replicate or 1), 1)
    replicate = replicate or max(dp // shard, 1)
    if shard * replicate != dp:
        said = ", ".join(f"{name}={value}" for name, value in degrees.items())
        good = {"dp": shard * replicate, "dp_shard": shard, "dp_replicate": replicate}
        raise ValueError(
            f"Plan({said}): dp replicas are dp_replicate groups of dp_shard, and dp is the product of the two, such as "
            f"{call_of(plan, good)}"
        )
    shards = shard * (whole(plan.cp) or 1)  # ranks along cp hold the same weights too
    if shards == 1 and replicate > 1 and plan.zero:
        among_all = {"dp": replicate, "dp_shard": None, "dp_replicate": None}
        raise ValueError(
            f"Plan(dp_shard=1, dp_replicate={replicate}, zero={plan.zero}): a group of one replica shards nothing. "
            f"Either shard among all replicas, {call_of(plan, among_all)}, or nothing: "
            f"{call_of(plan, among_all | {'zero': 0})}"
        )
    hybrid = replicate > 1 and (shard > 1 or bool(plan.zero))
    object.__setattr__(plan, "dp", dp)
    object.__setattr__(plan, "dp_shard", shard if hybrid else None)
    object.__setattr__(plan, "dp_replicate", replicate if hybrid else None)


def check_hybrid(plan: Plan) -> None:
    """Check that ZeRO shards something, if it is to shard within groups.

    Raises:
        ValueError: it does not.
    """
    if plan.dp_shard and not plan.zero:
        raise ValueError(
            f"{call_of(plan)}: dp_shard={plan.dp_shard} replicas share the states that ZeRO shards, and zero=0 shards "
            f"nothing. Either {call_of(plan, {'zero': 3})}, or without groups "
            f"{call_of(plan, {'dp_shard': None, 'dp_replicate': None})}"
        )


def change_plan(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with some fields changed; ZeRO shards within groups of as many replicas, as far as that works.

    >>> from mpkit.plan.plan import Plan
    >>> plan = Plan(dp=8, zero=3, dp_shard=4)
    >>> change_plan(plan, dp=16), change_plan(plan, zero=0), change_plan(plan, dp_shard=2).dp_replicate
    (Plan(dp=16, zero=3, dp_shard=4, dp_replicate=4), Plan(dp=8), 4)

    Raises:
        ValueError: the changed plan cannot work.
    """
    if plan.dp_shard is None:
        return replace(plan, **changes)
    groups = {name: changes.get(name) for name in ("dp_shard", "dp_replicate")}
    if not any(name in changes for name in groups):
        dp, zero = whole(changes.get("dp", plan.dp)) or 0, changes.get("zero", plan.zero)
        groups["dp_shard"] = plan.dp_shard if zero and dp % plan.dp_shard == 0 else None
    return replace(plan, **(changes | groups))

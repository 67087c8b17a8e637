"""Constructors of a Plan that have the name of a field, and what is answered to names of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from mpkit.common.calls import answers
from mpkit.errors import UnknownName
from mpkit.plan.checks import whole
from mpkit.plan.data_checks import with_options
from mpkit.plan.synonyms import MEANT, check_synonyms

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = ["ELSEWHERE", "NAMED_AS_FIELDS", "NamedConstructors"]


@answers("Plan.dp(replicas=4)", MEANT)
def dp(cls: type[Plan], replicas: int, **options: Any) -> Plan:
    """Plan data parallelism as torch.nn.DataParallel does it: rank 0 owns the model, replicates it and steps.

    Args:
        replicas: n, the number of ranks, each of which takes a part of the batch.
        options: other fields of a Plan.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.dp(2)
    Plan(dp=2, data_parallel='dp')
    """
    check_synonyms("Plan.dp(replicas=4)", replicas=replicas)
    return with_options(cls, {"dp": replicas, "data_parallel": "dp"}, options)


@answers("Plan.zero(stage=3, replicas=4)", MEANT)
def zero(cls: type[Plan], stage: int, replicas: int | None = None, **options: Any) -> Plan:
    """Plan ZeRO (Rajbhandari et al. 2020): states that all replicas would hold are sharded among them.

    Args:
        stage: 1 shards optimizer states, 2 gradients too, 3 parameters too.
        replicas: n, the number of ranks, each of which takes a part of the batch and a shard of the states.
        options: other fields of a Plan, such as offload or precision.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.zero(3, 4, precision="bf16")
    Plan(dp=4, zero=3, precision='bf16')
    """
    if replicas is None:
        raise ValueError(
            f"Plan.zero({stage}): among how many ranks? The stage comes first, then the number of replicas: "
            f"Plan.zero({whole(stage) if whole(stage) in (1, 2, 3) else 3}, 4)"
        )
    check_synonyms("Plan.zero(stage=3, replicas=4)", replicas=replicas)
    if whole(stage) not in (1, 2, 3):
        raise ValueError(
            f"Plan.zero(stage={stage!r}, replicas={replicas}): the stages of ZeRO are 1 (optimizer states sharded), 2 "
            f"(and gradients) and 3 (and parameters); without sharding it is Plan.ddp({replicas}). Such as "
            f"Plan.zero(stage=1, replicas={replicas})"
        )
    return with_options(cls, {"dp": replicas, "zero": stage}, options)


@answers("Plan.pp(stages=4, microbatches=8)", MEANT)
def pp(cls: type[Plan], stages: int, **options: Any) -> Plan:
    """Plan a pipeline: every rank holds a stage of the model.

    Args:
        stages: p, the number of ranks.
        options: other fields of a Plan, such as microbatches and schedule.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.pp(4, microbatches=8)
    Plan(pp=4, schedule='gpipe', microbatches=8)
    """
    check_synonyms("Plan.pp(stages=4)", stages=stages)
    return with_options(cls, {"pp": stages}, options)


@answers("Plan.tp(ranks=2)", MEANT)
def tp(cls: type[Plan], ranks: int, **options: Any) -> Plan:
    """Plan tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): every layer is divided among the ranks.

    Args:
        ranks: t, the number of ranks.
        options: other fields of a Plan, such as sequence_parallel.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.tp(2, sequence_parallel=True)
    Plan(tp=2, sequence_parallel=True)
    """
    check_synonyms("Plan.tp(ranks=2)", ranks=ranks)
    return with_options(cls, {"tp": ranks}, options)


@answers("Plan.cp(ranks=2)", MEANT)
def cp(cls: type[Plan], ranks: int, **options: Any) -> Plan:
    """Plan context parallelism (Liu et al., "Ring Attention", 2023): every sequence is divided among the ranks.

    Args:
        ranks: the number of ranks, each of which takes a part of every sequence.
        options: other fields of a Plan, such as cp_order.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.cp(2, cp_order="zigzag")
    Plan(cp=2, cp_order='zigzag')
    """
    check_synonyms("Plan.cp(ranks=2)", ranks=ranks)
    return with_options(cls, {"cp": ranks}, options)


@answers("Plan.ep(ranks=4)", MEANT)
def ep(cls: type[Plan], ranks: int, **options: Any) -> Plan:
    """Plan expert parallelism (Lepikhin et al., "GShard", 2020): the experts of each layer are divided among the ranks.

    Args:
        ranks: the number of ranks, each of which takes a part of the batch.
        options: other fields of a Plan, such as zero.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.ep(4)
    Plan(dp=4, ep=4)
    """
    check_synonyms("Plan.ep(ranks=4)", ranks=ranks)
    return with_options(cls, {"dp": ranks, "ep": ranks}, options)


NAMED_AS_FIELDS: dict[str, Callable[..., Plan]] = {
    "cp": cp,
    "dp": dp,
    "ep": ep,
    "pp": pp,
    "tp": tp,
    "zero": zero,
}

ELSEWHERE = {
    "fsdp": "Plan.zero(3, 8)", "fsdp2": "Plan.zero(3, 8)", "full_shard": "Plan.zero(3, 8)",
    "hsdp": "Plan.zero(3, 8, dp_shard=4)", "hybrid_shard": "Plan.zero(3, 8, dp_shard=4)",
    "mics": "Plan.zero(3, 8, dp_shard=4)",
    "ulysses": "Plan.cp(4, cp_method='ulysses')", "ring": "Plan.cp(4, cp_method='ring')",
    "megatron": "Plan.tp(4, sequence_parallel=True)", "sp": "Plan.tp(4, sequence_parallel=True)",
    "moe": "Plan.ep(4)",
}  # fmt: skip
"""For what other libraries call a strategy, the call that makes its Plan."""


class NamedConstructors(type):
    """The type of Plan: it answers a constructor that Plan does not have with the one that was meant.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.fsdp(8)
    Traceback (most recent call last):
    mpkit.errors.UnknownName: Plan has no constructor fsdp; it is Plan.zero(3, 8) here
    """

    def __getattr__(cls, name: str) -> Any:
        near = [] if name.startswith("_") else get_close_matches(name.lower(), dir(cls), 1, 0.6)
        hint = (
            f"; it is {ELSEWHERE[name]} here"
            if name in ELSEWHERE
            else f"; did you mean Plan.{near[0]}?"
            if near
            else ""
        )
        raise UnknownName(f"Plan has no constructor {name}{hint}")

"""Constructors of a Plan that have the name of a field."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpkit.common.calls import answers
from mpkit.plan.checks import whole
from mpkit.plan.data_checks import with_options
from mpkit.plan.synonyms import MEANT, check_synonyms

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = ["NAMED_AS_FIELDS"]


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


NAMED_AS_FIELDS: dict[str, Callable[..., Plan]] = {"cp": cp, "dp": dp, "tp": tp, "zero": zero}

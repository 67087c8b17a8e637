"""Constructors of a Plan that have a field's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpkit.plan_data_checks import with_options

if TYPE_CHECKING:
    from mpkit.plan import Plan

__all__ = ["NAMED_AS_FIELDS"]


def dp(cls: type[Plan], replicas: int, **options: Any) -> Plan:
    """Data parallelism as torch.nn.DataParallel does it: rank 0 has the model, lends it out, and steps.

    Args:
        replicas: n, ranks that each take a part of the batch.
        options: other fields of a Plan.

    >>> from mpkit.plan import Plan
    >>> Plan.dp(2)
    Plan(dp=2, data_parallel='dp')
    """
    return with_options(cls, {"dp": replicas, "data_parallel": "dp"}, options)


def zero(cls: type[Plan], stage: int, replicas: int | None = None, **options: Any) -> Plan:
    """ZeRO (Rajbhandari et al. 2020): what replicas hold alike is sharded among them.

    Args:
        stage: 1 shards optimizer states, 2 gradients too, 3 parameters too.
        replicas: n, ranks that each take a part of the batch and a shard of the states.
        options: other fields of a Plan, such as offload or precision.

    >>> from mpkit.plan import Plan
    >>> Plan.zero(3, 4, precision="bf16")
    Plan(dp=4, zero=3, precision='bf16')
    """
    if replicas is None:
        raise ValueError(
            f"Plan.zero({stage}): among how many ranks? The stage comes first, then the number of replicas: "
            f"Plan.zero({stage if stage in (1, 2, 3) else 3}, 4)"
        )
    return with_options(cls, {"dp": replicas, "zero": stage}, options)


def tp(cls: type[Plan], ranks: int, **options: Any) -> Plan:
    """Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): every layer is shared among the ranks.

    Args:
        ranks: t.
        options: other fields of a Plan, such as sequence_parallel.

    >>> from mpkit.plan import Plan
    >>> Plan.tp(2, sequence_parallel=True)
    Plan(tp=2, sequence_parallel=True)
    """
    return with_options(cls, {"tp": ranks}, options)


def cp(cls: type[Plan], ranks: int, **options: Any) -> Plan:
    """Context parallelism (Liu et al., "Ring Attention", 2023): every sequence is shared among the ranks.

    Args:
        ranks: parts of a sequence.
        options: other fields of a Plan, such as cp_order.

    >>> from mpkit.plan import Plan
    >>> Plan.cp(2, cp_order="zigzag")
    Plan(cp=2, cp_order='zigzag')
    """
    return with_options(cls, {"cp": ranks}, options)


NAMED_AS_FIELDS: dict[str, Callable[..., Plan]] = {"cp": cp, "dp": dp, "tp": tp, "zero": zero}

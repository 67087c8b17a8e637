"""Constructors of a Plan that have the name of a field, and what is answered to names of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from mpkit.common.calls import answers
from mpkit.errors import UnknownName
from mpkit.plan.kinds import constructors, keywords, whole


@answers("Plan.dp(replicas=4)", keywords)
def dp(cls: type[Any], replicas: int, **options: Any) -> Any:
    """Plan data parallelism on n ranks as torch.nn.DataParallel does it: rank 0 owns the model and steps.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.dp(2)
    Plan(dp=2, data_parallel='dp')
    """
    return cls(dp=replicas, data_parallel="dp", **options)


@answers("Plan.zero(stage=3, replicas=4)", keywords)
def zero(cls: type[Any], stage: int, replicas: int | None = None, **options: Any) -> Any:
    """Plan ZeRO (Rajbhandari et al. 2020): states that all n replicas would hold are sharded among them.

    Stage 1 shards optimizer states, 2 gradients too, 3 parameters too.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.zero(3, 4, precision="bf16")
    Plan(dp=4, zero=3, precision='bf16')
    """
    if replicas is None:
        raise ValueError(
            f"Plan.zero({stage}): among how many ranks? The stage comes first, then the number of replicas: "
            f"Plan.zero({whole(stage) if whole(stage) in (1, 2, 3) else 3}, 4)"
        )
    if whole(stage) not in (1, 2, 3):
        raise ValueError(
            f"Plan.zero(stage={stage!r}, replicas={replicas}): the stages of ZeRO are 1 (optimizer states sharded), 2 "
            f"(and gradients) and 3 (and parameters); without sharding it is Plan.ddp({replicas}). Such as "
            f"Plan.zero(stage=1, replicas={replicas})"
        )
    return cls(dp=replicas, zero=stage, **options)


@answers("Plan.tp(ranks=2)", keywords)
def tp(cls: type[Any], ranks: int, **options: Any) -> Any:
    """Plan tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): every layer is divided among t ranks.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.tp(2, sequence_parallel=True)
    Plan(tp=2, sequence_parallel=True)
    """
    return cls(tp=ranks, **options)


NAMED_AS_FIELDS: dict[str, Callable[..., Any]] = {"dp": dp, "tp": tp, "zero": zero}


class NamedConstructors(type):
    """The type of Plan: it answers a constructor that Plan does not have with the one that was meant.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.fsdp(8)
    Traceback (most recent call last):
    mpkit.errors.UnknownName: Plan has no constructor fsdp; it is Plan.zero(3, 8) here
    """

    def __getattr__(cls, name: str) -> Any:
        near = [] if name.startswith("_") else get_close_matches(name.lower(), dir(cls), 1, 0.6)
        hint = f"; did you mean Plan.{near[0]}?" if near else ""
        if name in constructors():
            hint = f"; it is {constructors()[name]} here"
        raise UnknownName(f"Plan has no constructor {name}{hint}")

"""Constructors of a Plan that have the name of a field, and what is answered to names of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from mpkit.common.calls import answers
from mpkit.errors import ArgumentError, UnknownName
from mpkit.plan.kinds import whole
from mpkit.plan.synonyms import constructors, keywords

__all__ = ["NAMED_AS_FIELDS", "NamedConstructors", "check_degrees", "with_options"]

P = TypeVar("P")


def with_options(make: type[P], options: dict[str, Any], **given: Any) -> P:
    """Make the plan with the fields that a constructor sets, and with options.

    Raises:
        ValueError: an option does not exist, or the constructor sets it already.
    """
    names = [field.name for field in fields(cast(Any, make)) if field.name not in given]
    for name in options:
        if name in keywords():
            raise ArgumentError(f"{name}={options[name]!r}: there is no such option here. {keywords()[name]}")
        if name not in names:
            near = get_close_matches(name, names, 1, 0.5)
            meant = f"Did you mean {near[0]}={options[name]!r}?" if near else ""
            raise ArgumentError(
                f"{name}={options[name]!r}: there is no such option here. {meant} There are {', '.join(names)}."
            )
    return make(**given, **options)


def check_degrees(example: str, **degrees: Any) -> None:
    """Check the degrees of a constructor under the names that they have there.

    Raises:
        ValueError: one is not a whole number, or is less than 1.

    >>> check_degrees("Plan.ddp(replicas=4)", replicas=0)
    Traceback (most recent call last):
    ValueError: Plan.ddp(replicas=0): replicas is a whole number, 1 or more, such as in Plan.ddp(replicas=4)
    """
    for name, value in degrees.items():
        number = whole(value)
        if number is None or number < 1:
            raise ValueError(
                f"{example.partition('(')[0]}({name}={value!r}): {name} is a whole number, 1 or more, such as in "
                f"{example}"
            )


@answers("Plan.dp(replicas=4)", keywords)
def dp(cls: type[Any], replicas: int, **options: Any) -> Any:
    """Plan data parallelism on n ranks as torch.nn.DataParallel does it: rank 0 owns the model and steps.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.dp(2)
    Plan(dp=2, data_parallel='dp')
    """
    check_degrees("Plan.dp(replicas=4)", replicas=replicas)
    return with_options(cls, options, dp=replicas, data_parallel="dp")


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
    check_degrees("Plan.zero(stage=3, replicas=4)", replicas=replicas)
    if whole(stage) not in (1, 2, 3):
        raise ValueError(
            f"Plan.zero(stage={stage!r}, replicas={replicas}): the stages of ZeRO are 1 (optimizer states sharded), 2 "
            f"(and gradients) and 3 (and parameters); without sharding it is Plan.ddp({replicas}). Such as "
            f"Plan.zero(stage=1, replicas={replicas})"
        )
    return with_options(cls, options, dp=replicas, zero=stage)


@answers("Plan.tp(ranks=2)", keywords)
def tp(cls: type[Any], ranks: int, **options: Any) -> Any:
    """Plan tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): every layer is divided among t ranks.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.tp(2, sequence_parallel=True)
    Plan(tp=2, sequence_parallel=True)
    """
    check_degrees("Plan.tp(ranks=2)", ranks=ranks)
    return with_options(cls, options, tp=ranks)


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

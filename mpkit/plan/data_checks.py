"""Checks of a Plan's data-parallel fields. Every message ends with a plan that works, to paste."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from math import isfinite
from typing import TYPE_CHECKING, Any

from mpkit.errors import ArgumentError
from mpkit.plan.checks import call_of, real, whole
from mpkit.plan.synonyms import MEANT, VALUES

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = ["check_data_parallel", "with_options"]

CHOICES = {
    "data_parallel": ("ddp", "dp"),
    "offload": ("none", "optimizer", "params"),
    "precision": ("full", "bf16", "fp16"),
    "unused": ("error", "allow"),
    "batchnorm": ("sync", "local"),
}


def check_data_parallel(plan: Plan) -> None:
    """Check the fields for data parallelism, each by itself and in combination.

    Numbers of other types (numpy's, say) become Python's own.

    Raises:
        ValueError: the fields cannot work.
    """
    for name, choices in CHOICES.items():
        _check_choice(plan, name, choices)
    stage = whole(plan.zero)
    if stage is None or stage not in range(4):
        changes, known = _meant_field("zero", plan.zero)
        if changes:
            raise ValueError(
                f"Plan(zero={plan.zero!r}): zero is the stage of ZeRO, 0 to 3. {known}Such as {call_of(plan, changes)}"
            )
        raise ValueError(
            f"Plan(zero={plan.zero!r}): ZeRO has the stages 1 (optimizer states sharded), 2 (and gradients) and 3 (and "
            f"parameters); 0 is plain DDP. Such as {call_of(plan, {'zero': 1})}"
        )
    object.__setattr__(plan, "zero", stage)
    prefetch = whole(plan.prefetch)
    if prefetch is None or prefetch < 0:
        raise ValueError(
            f"Plan(prefetch={plan.prefetch!r}): how many layers ahead ZeRO-3 gathers, a whole number, 0 or more: "
            f"{call_of(plan, {'prefetch': 1})}"
        )
    object.__setattr__(plan, "prefetch", prefetch)
    bucket = real(plan.bucket_mb)
    if bucket is None or not bucket > 0 or not isfinite(bucket):
        raise ValueError(
            f"Plan(bucket_mb={plan.bucket_mb!r}): the size of a bucket of gradients in MiB, a number above 0, such as "
            f"{call_of(plan, {'bucket_mb': 10})}"
        )
    object.__setattr__(plan, "bucket_mb", whole(plan.bucket_mb) or bucket)
    _check_together(plan)


def with_options(make: type[Plan], given: dict[str, Any], options: dict[str, Any]) -> Plan:
    """Make the plan with these fields and options.

    Raises:
        ValueError: an option does not exist, or the constructor sets it already.
    """
    names = [field.name for field in fields(make) if field.name not in given]
    for name in options:
        if name in MEANT:
            raise ArgumentError(f"{name}={options[name]!r}: there is no such option here. {MEANT[name]}")
        if name not in names:
            near = get_close_matches(name, names, 1, 0.5)
            meant = f"Did you mean {near[0]}={options[name]!r}?" if near else ""
            raise ArgumentError(
                f"{name}={options[name]!r}: there is no such option here. {meant} There are {', '.join(names)}."
            )
    return make(**given, **options)


def _check_choice(plan: Plan, name: str, choices: tuple[str, ...]) -> None:
    value: Any = getattr(plan, name)
    if not isinstance(value, str) or value not in choices:
        changes, known = _meant_field(name, value)
        if not changes:
            changes = {name: (get_close_matches(str(value).lower(), choices, 1, 0.3) or [choices[0]])[0]}
        raise ValueError(
            f"Plan({name}={value!r}): {name} is one of {', '.join(map(repr, choices))}. {known}"
            f"Did you mean {call_of(plan, changes)}"
        )


def _meant_field(name: str, value: Any) -> tuple[dict[str, Any], str]:
    """Return the field that another library's word means, and what to know of it; ({}, "") for an unknown word."""
    word = str(value).lower()
    if name == "data_parallel" and word in VALUES["zero"]:
        stage, known = VALUES["zero"][word]
        return {"data_parallel": "ddp", "zero": stage}, f"{known} "
    ours, known = VALUES.get(name, {}).get(word, (None, ""))
    return ({} if ours is None else {name: ours}), (f"{known} " if known else "")


def _check_together(plan: Plan) -> None:
    if plan.data_parallel == "dp" and plan.ranks > plan.dp:
        raise ValueError(
            f"{call_of(plan)}: DP lends the whole model to its ranks, and so knows no other axis. What works "
            f"together with them is {call_of(plan, {'data_parallel': 'ddp'})}"
        )
    if plan.data_parallel == "dp" and (plan.zero or plan.offload != "none"):
        raise ValueError(
            f"{call_of(plan)}: DP keeps the whole model on rank 0, which shards nothing: zero and offload go with "
            f"{call_of(plan, {'data_parallel': 'ddp'})}"
        )
    if plan.offload == "params" and plan.zero != 3:
        raise ValueError(
            f"{call_of(plan)}: parameters can be kept on the host where they are gathered layer by layer, in stage 3. "
            f"Either offload='optimizer', or {call_of(plan, {'zero': 3})}"
        )

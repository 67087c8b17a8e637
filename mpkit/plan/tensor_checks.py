"""Checks of a Plan's fields for layers and sequences that ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from mpkit.plan.checks import call_of
from mpkit.plan.tensor_plan import TensorPlan

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = [
    "CONTIGUOUS", "METHODS", "ORDERS", "ZIGZAG", "check_shared_layers", "checked_cp_method",
]  # fmt: skip

ORDERS = CONTIGUOUS, ZIGZAG = ("contiguous", "zigzag")
METHODS = ("ring", "ulysses")
ALL_TO_ALL = ("all_to_all", "alltoall", "a2a", "sp", "deepspeed")
"""Other names of Ulysses."""


def checked_cp_method(plan: Plan) -> str:
    """Return how attention sees a divided sequence: "ring" or "ulysses".

    Raises:
        ValueError: there is no such method.
    """
    method: Any = plan.cp_method
    if isinstance(method, str) and method in METHODS:
        return method
    word = str(method).lower()
    near = "ulysses" if word in ALL_TO_ALL or get_close_matches(word, ["ulysses"], 1, 0.5) else "ring"
    raise ValueError(
        f"Plan(cp_method={method!r}): attention over a divided sequence passes keys and values around, 'ring', or "
        f"divides the heads meanwhile, 'ulysses': {call_of(plan, {'cp_method': near})}"
    )


def check_shared_layers(plan: Plan) -> None:
    """Check the fields of tensor and context parallelism; each error shows a plan that works, to paste.

    Raises:
        ValueError: the fields cannot work.
    """
    order: Any = plan.cp_order
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(
            f"Plan(cp_order={plan.cp_order!r}): a rank's part of a sequence is 'contiguous', or in two pieces, "
            f"'zigzag', so that causal attention is as much work for each: {call_of(plan, {'cp_order': 'zigzag'})}"
        )
    if plan.cp_method == "ulysses" and order != "contiguous":
        raise ValueError(
            f"{call_of(plan)}: under Ulysses each rank attends with some heads to whole sequences, which is as much "
            f"work for each in contiguous parts: {call_of(plan, {'cp_order': 'contiguous'})}"
        )
    if not isinstance(plan.sequence_parallel, bool):
        raise ValueError(
            f"Plan(sequence_parallel={plan.sequence_parallel!r}): True, or False: "
            f"{call_of(plan, {'sequence_parallel': True})}"
        )
    if plan.sequence_parallel and plan.tp == 1:
        raise ValueError(
            f"{call_of(plan)}: sequence parallelism divides what is between tensor-parallel layers among the ranks "
            f"that share them, and tp=1. Either {call_of(plan, {'tp': 2})}, or, to share sequences without sharing "
            f"layers, {call_of(plan, {'cp': 2, 'sequence_parallel': False})}"
        )
    given: Any = plan.tensor
    if given is not None and not isinstance(given, TensorPlan):
        what = "a dict" if isinstance(given, Mapping) else f"{given!r}"
        raise ValueError(
            f"Plan(tensor={what}): which layers are divided is an mk.tensor.TensorPlan, such as "
            "mk.tensor.find_tensor_plan(model) "
            f"gives; left out, that is what is taken: {call_of(plan, {'tensor': None})}"
        )

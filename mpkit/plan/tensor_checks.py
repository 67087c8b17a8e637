"""Checks of a Plan's fields for layers and sequences that ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from math import gcd
from typing import TYPE_CHECKING, Any

from mpkit.plan.checks import call_of, whole
from mpkit.plan.tensor_plan import TensorPlan

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = [
    "BALANCED", "BY_DOCUMENT", "CONTIGUOUS", "METHODS", "ORDERS", "ZIGZAG", "check_shared_layers", "checked_cp_method",
]  # fmt: skip

OF_SEQUENCES = CONTIGUOUS, ZIGZAG = ("contiguous", "zigzag")
BY_DOCUMENT = DOCUMENTS, BALANCED = ("documents", "balanced")
"""The orders of chunks that are made for packed documents."""
ORDERS = OF_SEQUENCES + BY_DOCUMENT
METHODS = ("ring", "ulysses")
ALL_TO_ALL = ("all_to_all", "alltoall", "a2a", "sp", "deepspeed")
"""Other names of Ulysses."""
BOTH = ("usp", "a2a+p2p", "ulysses x ring", "hybrid", "ulysses_ring")
"""Other names of Ulysses times ring."""


def checked_cp_method(plan: Plan) -> str | tuple[int, int]:
    """Return how attention sees a divided sequence; two degrees of which one is 1 are a ring, or Ulysses, alone.

    >>> from mpkit.plan.plan import Plan
    >>> Plan(cp=8, cp_method=(2, 4)).cp_method, Plan(cp=4, cp_method=(4, 1)).cp_method
    ((2, 4), 'ulysses')

    Raises:
        ValueError: there is no such method, or two degrees whose product is not cp.
    """
    method: Any = plan.cp_method
    if isinstance(method, str) and method in METHODS:
        return method
    if not isinstance(method, (tuple, list)):
        word = str(method).lower()
        near: Any = (
            "ulysses" if word in ALL_TO_ALL or get_close_matches(word, ["ulysses"], 1, 0.5) else "ring"
        )
        if word in BOTH:
            near = (2, plan.cp // 2 or 1)
        raise ValueError(
            f"Plan(cp_method={method!r}): attention over a divided sequence passes keys and values around, 'ring', or "
            f"divides the heads meanwhile, 'ulysses', or does both, as (2, 4) does among 2 x 4 ranks: "
            f"{call_of(plan, {'cp_method': near} | ({'cp': near[0] * near[1]} if word in BOTH else {}))}"
        )
    degrees = [whole(degree) for degree in method]
    if len(degrees) != 2 or any(degree is None or degree < 1 for degree in degrees):
        raise ValueError(
            f"Plan(cp_method={method!r}): two degrees are whole numbers, 1 or more: the ranks that divide heads "
            f"(Ulysses), and those in a ring: {call_of(plan, {'cp': 8, 'cp_method': (2, 4)})}"
        )
    ulysses, ring = (degree or 1 for degree in degrees)
    if ulysses * ring != plan.cp:
        would = [call_of(plan, {"cp": ulysses * ring})]
        if 1 < (heads := gcd(ulysses, plan.cp)) < plan.cp:
            would.append(call_of(plan, {"cp_method": (heads, plan.cp // heads)}))
        raise ValueError(
            f"{call_of(plan)}: {ulysses} ranks that divide heads (Ulysses) times {ring} in a ring are "
            f"{ulysses * ring} that share each sequence, and cp={plan.cp}: {', or '.join(would)}"
        )
    return "ring" if ulysses == 1 else "ulysses" if ring == 1 else (ulysses, ring)


def check_shared_layers(plan: Plan) -> None:
    """Check the fields of tensor and context parallelism; each error shows a plan that works, to paste.

    Raises:
        ValueError: the fields cannot work.
    """
    order: Any = plan.cp_order
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(
            f"Plan(cp_order={plan.cp_order!r}): a rank's part of a sequence is 'contiguous', or in two pieces, "
            "'zigzag', so that causal attention is as much work for each; of packed documents two pieces of each, "
            f"'documents', or blocks that are as much work, 'balanced': {call_of(plan, {'cp_order': 'zigzag'})}"
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

"""The stages of ZeRO by number: the one place where a plan becomes one of them."""

from __future__ import annotations

from collections.abc import Callable

from mpkit.strategies.data_parallel.replicated_part import ReplicatedPart
from mpkit.strategies.zero.offload import OffloadedZero3
from mpkit.strategies.zero.zero import Zero
from mpkit.strategies.zero.zero1 import Zero1
from mpkit.strategies.zero.zero2 import Zero2
from mpkit.strategies.zero.zero3 import Zero3

__all__ = ["STAGES", "zero_sync"]

STAGES: dict[tuple[int, bool], Callable[[ReplicatedPart], Zero]] = {
    (1, False): Zero1,
    (2, False): Zero2,
    (3, False): Zero3,
    (3, True): OffloadedZero3,
}
"""By the plan's `zero`, and whether it offloads parameters."""


def zero_sync(held: ReplicatedPart) -> Zero:
    """Return the stage of ZeRO that the plan asks for.

    Args:
        held: this rank's part of the model, and its replicas.
    """
    return STAGES[held.plan.zero, held.plan.offload == "params"](held)

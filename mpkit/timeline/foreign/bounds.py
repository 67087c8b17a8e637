"""What bounds each kernel: so other hardware scales matrix products by its rate, and the rest by its memory.

    fixed      the first microseconds of every kernel, which no device saves
    product    matrix products, convolutions and attention, by dtype: the operator's, else what the kernel's name says
    memory     everything else; and products of operands that are not aligned, which do not feed the matrix units

Source: Williams, Waterman and Patterson 2009, for the two bounds. H100 and MI300X traces of the same five programs
(AMD-AGI/TraceLens, tests/traces) have 1.5 to 1.6 times as much time in what is memory here, and memories of 1.58 times.
`FIXED` and the products that are called unaligned were chosen with these traces at hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from mpkit.timeline.foreign.actions import ProfiledAction
from mpkit.timeline.foreign.lanes import DeviceWork
from mpkit.timeline.foreign.reading.events import Events

__all__ = ["FIXED", "bounds_of"]

FIXED = 2_000
"""ns of each kernel that are the same on all devices."""

_PRODUCT = re.compile(
    r"gemm|cutlass|cublas|nvjet|matmul|conv|cudnn|[wd]grad|fprop|Cijk_|\bbmm|flash|fmha|attn|attention|igemm|miopen",
    re.I,
)
_UNALIGNED = re.compile(r"align1\b|gemv|splitKreduce", re.I)
_NAMED = (
    ("float8", re.compile(r"e4m3|e5m2|fp8(?!KVCache)|_F8", re.I)),
    ("bfloat16", re.compile(r"bf16|bfloat|half|f16|hgemm|Cijk_\w+?_(?:B|H)[BHS]_", re.I)),
    ("tfloat32", re.compile(r"tf32|s1688", re.I)),
    ("float32", re.compile("")),
)
_OF_OPERATOR = {1: "float32", 2: "bfloat16", 3: "float8"}
"""By the number that `EventTable.operand` has for an operator's first operands."""


def bounds_of(
    events: Events, work: DeviceWork, actions: Sequence[ProfiledAction]
) -> dict[str, dict[str, int]]:
    """Return the ns of kernels by what bounds them, for each kind of action; nothing for a CPU.

    Args:
        events: a rank's events.
        work: what it computes.
        actions: its actions.
    """
    if not events.on_device:
        return {}
    kernels, operands = events["kernel"].name[work.row], events.operators("kernel")[work.row]
    operand = np.where(operands >= 0, np.append(events["op"].operand, 0)[operands], 0)
    took = work.end - work.start
    found: dict[str, dict[str, int]] = {}
    classes: dict[tuple[int, int], str] = {}
    for action in actions:
        sums = found.setdefault(action.kind.word, {})
        for at in range(action.first, action.last):
            key = int(kernels[at]), int(operand[at])
            bound = classes.get(key)
            if bound is None:
                bound = classes[key] = _bound_of(events.names[key[0]], key[1])
            fixed = min(int(took[at]), FIXED)
            sums["fixed"] = sums.get("fixed", 0) + fixed
            sums[bound] = sums.get(bound, 0) + int(took[at]) - fixed
    return found


def _bound_of(kernel: str, operand: int) -> str:
    """Return what bounds a kernel: "memory", or the dtype of a product."""
    if not _PRODUCT.search(kernel) or _UNALIGNED.search(kernel):
        return "memory"
    named = next(dtype for dtype, words in _NAMED if words.search(kernel))
    dtype = _OF_OPERATOR.get(operand, named)
    return named if dtype == "float32" and named == "tfloat32" else dtype

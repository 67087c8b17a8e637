"""DDP's buckets: gradients in the order in which the backward makes them, cut where a bucket is full.

Source: Li et al. 2020, section 3.2.3; torch's reducer.cpp, `compute_bucket_assignment_by_size`: the first bucket is of
1 MiB and more, the others of `bucket_cap_mb`, 25 MiB unless the program says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["describe_buckets", "fits_gradients"]

_MIB = 2**20


def fits_gradients(buckets: Sequence[int], gradients: Sequence[int]) -> bool:
    """Say whether buckets are consecutive parts of gradients in the order of the backward.

    >>> fits_gradients([30, 12], [10, 20, 5, 7]), fits_gradients([25, 17], [10, 20, 5, 7])
    (True, False)

    Args:
        buckets: elements of each bucket.
        gradients: elements of each gradient.
    """
    return bool(buckets) and set(accumulate(buckets)) <= set(accumulate(gradients))


def describe_buckets(
    payloads: Sequence[tuple[int, int]], gradients: Sequence[int], ranks: int, *, ddp: bool = True
) -> str:
    """Return a sentence on the all-reduces of a step's backward.

    Args:
        payloads: bytes and elements of each.
        gradients: elements of each gradient in the order of the backward; empty if unknown.
        ranks: how many ranks reduce.
        ddp: whether the program says that DDP does.

    >>> describe_buckets([(120, 30), (48, 12)], [10, 20, 5, 7], 2)
    "2 all-reduces among 2 ranks in the backward, of 30 and 12 elements: DDP's buckets, each of which ends with a \
parameter in the order of the backward."
    """
    many = "s" * (len(payloads) > 1)
    start = f"{len(payloads)} all-reduce{many} among {ranks} ranks in the backward"
    if not all(nbytes for nbytes, _ in payloads):
        return f"{start}, of a size that is not in the file: as DDP reduces gradients in buckets."
    elements = [count for _, count in payloads]
    each = ", ".join(f"{count:,}" for count in elements[:8]) + (", ..." if len(elements) > 8 else "")
    each = " and ".join(each.rsplit(", ", 1)) if len(elements) <= 8 else each
    start += f", of {each} elements"
    if fits_gradients(elements, gradients):
        return f"{start}: DDP's buckets, each of which ends with a parameter in the order of the backward."
    if not ddp and len(elements) == len(gradients):
        return f"{start}, as many as there are gradients: a reduction of each parameter's own."
    sizes = ", ".join(f"{nbytes / _MIB:.3g}" for nbytes, _ in payloads[:8])
    return f"{start} ({sum(elements):,} in all; {sizes} MiB): as DDP reduces gradients in buckets."

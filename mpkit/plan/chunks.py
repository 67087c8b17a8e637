"""Which chunks of a packed sequence each of n ranks has, so that attention is as much work for each.

A packed sequence is several documents, one after another. A token attends to itself and to those before it in its own
document, so token i of a document has i + 1 keys to attend to, and a document of l tokens has l (l + 1) / 2.

    contiguous   chunk i of n                          the end of a long document is all on one rank
    zigzag       chunks i and 2n - 1 - i of 2n         balanced for one document, by chance for several
    documents    the same, within every document       balanced; each document is a multiple of 2n tokens
    balanced     blocks of equal length, dealt largest first to the rank with the least work: balanced for any lengths

Whatever the order, each rank has s / n tokens. Sources: Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2
(zigzag); Graham, "Bounds on Multiprocessing Timing Anomalies", 1969 (largest first).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any

from mpkit.common.tracebacks import public
from mpkit.plan.tensor_checks import ORDERS

__all__ = ["Chunk", "attention_work", "chunk_work", "deal_chunks", "split_by_document"]

Chunk = tuple[int, int]
"""Where some consecutive tokens of a sequence begin and end."""

NEAR = 1.001
"""The work of the busiest rank, divided by the mean, at which smaller blocks are not tried."""
MOST_BLOCKS = 64
"""Blocks per rank, unless a rank's tokens cannot be divided into so few."""


def deal_chunks(documents: Sequence[int], n: int, order: str) -> list[list[Chunk]]:
    """Return the chunks of each rank, ascending.

    >>> deal_chunks([4, 12], 2, "zigzag")
    [[(0, 4), (12, 16)], [(4, 8), (8, 12)]]
    >>> deal_chunks([4, 12], 2, "documents")[0]
    [(0, 1), (3, 4), (4, 7), (13, 16)]

    Args:
        documents: the lengths of the documents, whose sum s is a multiple of n.
        n: the number of ranks.
        order: "contiguous", "zigzag", "documents" or "balanced".

    Raises:
        ValueError: a document cannot be divided in this order.
    """
    s = sum(documents)
    if order not in ORDERS:
        raise ValueError(
            f"cp_order={order!r}: one of {', '.join(map(repr, ORDERS))}, such as cp_order='zigzag'"
        )
    if order == "balanced":
        return _deal_by_work(documents, n)
    if order == "contiguous":
        return [[(rank * s // n, (rank + 1) * s // n)] for rank in range(n)]
    lengths = [s] if order == "zigzag" else documents
    dealt: list[list[Chunk]] = [[] for _ in range(n)]
    begin = 0
    for length in lengths:
        if length % (2 * n):
            raise ValueError(
                f"cp_order={order!r} cuts {'each document' if order == 'documents' else 'a sequence'} into 2 x {n} "
                f"chunks of equal length, and one has {length} tokens: pad it to {-(-length // (2 * n)) * 2 * n}, or "
                "take cp_order='balanced', which divides documents of any length."
            )
        c = length // (2 * n)
        for rank in range(n):
            for chunk in (rank, 2 * n - 1 - rank):
                dealt[rank].append((begin + chunk * c, begin + (chunk + 1) * c))
        begin += length
    return dealt


@public
def attention_work(documents: Sequence[int], ranks: int, cp_order: str = "contiguous") -> list[int]:
    """Return, by rank, how many keys its tokens attend to in a packed sequence: what context parallelism computes.

    >>> for order in ("contiguous", "zigzag", "documents", "balanced"):
    ...     print(order.ljust(10), attention_work([4, 12], 2, order))
    contiguous [20, 68]
    zigzag     [52, 36]
    documents  [44, 44]
    balanced   [44, 44]

    Args:
        documents: the lengths of the documents, in order.
        ranks: the number of ranks that share the sequence in a ring.
        cp_order: which tokens each rank has, as in a Plan.

    Raises:
        ValueError: the ranks cannot share the sequence in this order.
    """
    given: Any = documents
    lengths: list[Any] = [*given, ranks] if isinstance(given, Iterable) else [0]
    if not all(isinstance(length, Integral) and length > 0 for length in lengths):  # type: ignore[operator]
        raise ValueError(
            f"attention_work({documents!r}, {ranks!r}): the lengths of documents, and a number of ranks, such as "
            "attention_work([4, 12], 2)"
        )
    s = sum(documents)
    if s % ranks:
        raise ValueError(
            f"attention_work: {ranks} ranks cannot share {s} tokens equally: {s // ranks * ranks} they can"
        )
    dealt = deal_chunks(documents, ranks, cp_order)
    return [sum(chunk_work(documents, chunk) for chunk in chunks) for chunks in dealt]


def chunk_work(documents: Sequence[int], chunk: Chunk) -> int:
    """Return how many keys the tokens of a chunk attend to.

    >>> chunk_work([4, 12], (3, 6))  # the last token of the first document, and two of the second
    7
    """
    work = 0
    for begin, (start, stop) in split_by_document(documents, chunk):
        first, last = start - begin, stop - begin
        work += (last * (last + 1) - first * (first + 1)) // 2
    return work


def split_by_document(documents: Sequence[int], chunk: Chunk) -> list[tuple[int, Chunk]]:
    """Return the parts of a chunk that belong to one document each, with where that document begins.

    >>> split_by_document([4, 12], (3, 6))
    [(0, (3, 4)), (4, (4, 6))]
    """
    ends = list(accumulate(documents))
    parts, (start, stop) = [], chunk
    while start < stop:
        number = bisect_right(ends, start)
        end = min(stop, ends[number])
        parts.append((ends[number] - documents[number], (start, end)))
        start = end
    return parts


def _deal_by_work(documents: Sequence[int], n: int) -> list[list[Chunk]]:
    """Deal blocks, the largest that balance: the fewer there are, the larger are the products of a rank."""
    s = sum(documents)
    each, mean = s // n, sum(length * (length + 1) // 2 for length in documents) / n
    best, least = [[(rank * each, (rank + 1) * each)] for rank in range(n)], float("inf")
    sizes = [size for size in range(each // 2, 0, -1) if each % size == 0]
    for size in [size for size in sizes if each // size <= MOST_BLOCKS] or [1]:
        blocks = [(chunk_work(documents, (at, at + size)), (at, at + size)) for at in range(0, s, size)]
        dealt = _deal_largest_first(blocks, n)
        busiest = max(sum(work for work, _ in mine) for mine in dealt)
        if busiest < least:
            best, least = [sorted(block for _, block in mine) for mine in dealt], busiest
        if least <= NEAR * mean:
            break
    return best


def _deal_largest_first(blocks: Sequence[tuple[int, Chunk]], n: int) -> list[list[tuple[int, Chunk]]]:
    """Deal equally many blocks to each rank, the largest first to the rank with the least; then swap what evens out."""
    dealt: list[list[tuple[int, Chunk]]] = [[] for _ in range(n)]
    loads = [0] * n
    for block in sorted(blocks, key=lambda block: -block[0]):
        rank = min((r for r in range(n) if len(dealt[r]) < len(blocks) // n), key=loads.__getitem__)
        dealt[rank].append(block)
        loads[rank] += block[0]
    for _ in range(MOST_BLOCKS):
        high, low = max(range(n), key=loads.__getitem__), min(range(n), key=loads.__getitem__)
        gap = loads[high] - loads[low]
        swaps = ((abs(gap - 2 * (a[0] - b[0])), a, b) for a in dealt[high] for b in dealt[low] if a[0] > b[0])
        left, a, b = min(swaps, default=(gap, None, None), key=lambda swap: swap[0])
        if left >= gap or a is None or b is None:
            break
        for rank, gone, come in ((high, a, b), (low, b, a)):
            dealt[rank].remove(gone)
            dealt[rank].append(come)
            loads[rank] += come[0] - gone[0]
    return dealt

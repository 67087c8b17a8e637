"""Which chunks of a sequence each of n ranks has, and how much work attention is for each.

A packed sequence is several documents, one after another. A token attends to itself and to those before it in its own
document, so token i of a document has i + 1 keys to attend to, and a document of l tokens has l (l + 1) / 2.

    contiguous   chunk i of n                    the end of a long document is all on one rank
    zigzag       chunks i and 2n - 1 - i of 2n   balanced for one document, by chance for several

Whatever the order, each rank has s / n tokens. Source: Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2
(zigzag).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any

from mpkit.common.tracebacks import public
from mpkit.plan.kinds import CONTIGUOUS, ORDERS

__all__ = ["Chunk", "attention_work", "chunk_work", "deal_chunks", "split_by_document"]

Chunk = tuple[int, int]
"""Where some consecutive tokens of a sequence begin and end."""


def deal_chunks(documents: Sequence[int], n: int, order: str) -> list[list[Chunk]]:
    """Return the chunks of each rank, ascending.

    >>> deal_chunks([4, 12], 2, "zigzag")
    [[(0, 4), (12, 16)], [(4, 8), (8, 12)]]

    Args:
        documents: the lengths of the documents, whose sum s is a multiple of n.
        n: the number of ranks.
        order: "contiguous" or "zigzag".

    Raises:
        ValueError: the sequence cannot be divided in this order.
    """
    s = sum(documents)
    if order not in ORDERS:
        raise ValueError(
            f"cp_order={order!r}: one of {', '.join(map(repr, ORDERS))}, such as cp_order='zigzag'"
        )
    if order == CONTIGUOUS:
        return [[(rank * s // n, (rank + 1) * s // n)] for rank in range(n)]
    if s % (2 * n):
        raise ValueError(
            f"cp_order='zigzag' cuts a sequence into 2 x {n} chunks of equal length, and one has {s} tokens: pad it to "
            f"{-(-s // (2 * n)) * 2 * n}, or take cp_order='contiguous'."
        )
    c = s // (2 * n)
    return [[(chunk * c, (chunk + 1) * c) for chunk in (rank, 2 * n - 1 - rank)] for rank in range(n)]


@public
def attention_work(documents: Sequence[int], ranks: int, cp_order: str = "contiguous") -> list[int]:
    """Return, by rank, how many keys its tokens attend to in a packed sequence: what context parallelism computes.

    >>> for order in ("contiguous", "zigzag"):
    ...     print(order.ljust(10), attention_work([4, 12], 2, order))
    contiguous [20, 68]
    zigzag     [52, 36]

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

"""How much work attention is for each of n ranks that share a packed sequence: several documents, one after another.

A token attends to itself and to those before it in its own document, so token i of a document attends to i + 1 keys.

    contiguous   chunk i of n                    the end of a long document is all on one rank
    zigzag       chunks i and 2n - 1 - i of 2n   balanced for one document, by chance for several

Whatever the order, each rank has s / n tokens. Source: Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2
(zigzag).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from mpkit.common.tracebacks import public
from mpkit.plan.kinds import CONTIGUOUS, ORDERS

__all__ = ["attention_work"]


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
    if cp_order not in ORDERS:
        raise ValueError(
            f"cp_order={cp_order!r}: one of {', '.join(map(repr, ORDERS))}, such as cp_order='zigzag'"
        )
    keys = [i + 1 for length in documents for i in range(length)]
    chunks = ranks if cp_order == CONTIGUOUS else 2 * ranks
    size, rest = divmod(len(keys), chunks)
    if rest:
        raise ValueError(
            f"attention_work: a sequence of {len(keys)} tokens cannot be cut into {chunks} chunks of equal length: pad "
            f"it to {(size + 1) * chunks}"
        )
    work = [sum(keys[chunk * size : (chunk + 1) * size]) for chunk in range(chunks)]
    return work if cp_order == CONTIGUOUS else [work[rank] + work[-1 - rank] for rank in range(ranks)]

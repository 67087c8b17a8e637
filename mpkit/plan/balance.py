"""Even work: a chain of layers in contiguous stages, and the attention of ranks that share a packed sequence."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from math import inf
from numbers import Integral
from typing import Any

from mpkit.common.tracebacks import public
from mpkit.plan.kinds import CONTIGUOUS, ORDERS


@public
def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Cut a chain into contiguous stages so that the most expensive stage costs as little as possible.

    The slowest stage sets a pipeline's pace. Among the best cuts by that measure, choose the one with the smallest sum
    of squares, so that the other stages are balanced too, and among those the one whose earliest stages are longest.
    `costs` has the cost of each layer, such as its FLOPs; the result, the layers of each stage.

    >>> balance([1, 1, 1, 1, 4], 3)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    layers = len(costs)
    assert 1 <= stages <= layers
    upto = [0.0]  # upto[i]: cost of the layers before i
    for cost in costs:
        upto.append(upto[-1] + cost)

    @cache
    def dearest(first: int, parts: int) -> float:
        """Return the least possible cost of the most expensive of `parts` stages, for the layers from `first` on."""
        if parts == 1:
            return upto[layers] - upto[first]
        least = inf
        for end in range(first + 1, layers - parts + 2):
            cost = upto[end] - upto[first]
            if cost >= least:
                break  # a longer first stage would cost even more
            least = min(least, max(cost, dearest(end, parts - 1)))
        return least

    limit = dearest(0, stages) * (1 + 1e-12)

    @cache
    def evenest(first: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """Return the least sum of squared costs within `limit`, and the stages' ends, negated: a later one is less."""
        best: tuple[float, tuple[int, ...]] = (inf, ())
        for end in range(first + 1, layers - parts + 2) if parts > 1 else [layers]:
            cost = upto[end] - upto[first]
            if cost > limit:
                break
            rest, later = evenest(end, parts - 1) if parts > 1 else (0.0, ())
            best = min(best, (cost**2 + rest, (-end, *later)))
        return best

    bounds = [0, *(-end for end in evenest(0, stages)[1])]
    return [range(a, b) for a, b in pairwise(bounds)]


@public
def attention_work(documents: Sequence[int], ranks: int, cp_order: str = "contiguous") -> list[int]:
    """Return, by rank, how many keys its tokens attend to in a packed sequence: what context parallelism computes.

    A token attends to itself and to those before it in its own document, so token i of a document attends to i + 1
    keys. Each rank has s / n tokens of the sequence, which is several documents, one after another:

        contiguous   chunk i of n                    the end of a long document is all on one rank
        zigzag       chunks i and 2n - 1 - i of 2n   balanced for one document, by chance for several

    Source: Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2 (zigzag).

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
        orders = ", ".join(map(repr, ORDERS))
        raise ValueError(f"cp_order={cp_order!r}: one of {orders}, such as cp_order='zigzag'")
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

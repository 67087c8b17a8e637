"""Documents that are packed in each sequence: what the busiest of the ranks that share it computes.

    causal   a token attends to half of itself and to those before it in its document: of one document s^2 / 2 scores
    whole    a token attends to its whole document, where attention is not causal

All are shares of the s x s / n scores that a rank's s / n tokens have with all s tokens, so that 1 / 2 is causal
attention to one document, divided equally. Packed documents of l_i tokens have sum l_i^2 / s^2 of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

from mpkit.plan.checks import call_of, whole
from mpkit.plan.chunks import attention_work, deal_chunks, split_by_document
from mpkit.plan.plan import Plan
from mpkit.plan.tensor_checks import BALANCED, CONTIGUOUS

__all__ = [
    "best_order",
    "busiest_share",
    "check_order",
    "checked_documents",
    "describe_documents",
]


def checked_documents(documents: object, sequence: int) -> tuple[int, ...]:
    """Return the lengths of the documents of a sequence; () if it is a single one.

    Raises:
        ValueError: they are no lengths, or do not add up to the sequence.

    >>> checked_documents([4, 12], 16), checked_documents(None, 16), checked_documents([16], 16)
    ((4, 12), (), ())
    """
    if documents is None:
        return ()
    listed = list(documents) if isinstance(documents, Iterable) and not isinstance(documents, str) else []
    lengths = [whole(length) or 0 for length in listed]
    if min(lengths, default=0) < 1:
        raise ValueError(
            f"documents={documents!r:.80}: the lengths, in tokens, of the documents that are packed in each sequence: "
            f"documents={[sequence // 4, sequence - sequence // 4]}"
        )
    if (total := sum(lengths)) != sequence:
        padding = sequence - total
        rest = f"the {padding} tokens of padding are a document, too, or " if padding > 0 else ""
        raise ValueError(
            f"documents={lengths!r:.60} add up to {total} tokens, and sequence={sequence}: {rest}sequence={total}"
        )
    return tuple(lengths) if len(lengths) > 1 else ()


def check_order(plan: Plan, documents: Sequence[int]) -> None:
    """Check that a plan's order of chunks can divide documents.

    Raises:
        ValueError: it cannot; the message has a plan that can.
    """
    try:
        deal_chunks(documents, plan.mesh.cp_ring, plan.cp_order)
    except ValueError as error:
        would = call_of(plan, {"cp_order": BALANCED})
        raise ValueError(f"{plan!r}: {str(error).removesuffix('.')}: {would}") from None


def whole_work(documents: Sequence[int], ranks: int, cp_order: str) -> list[int]:
    """Return, by rank, the scores of its tokens with all tokens of their documents.

    >>> whole_work([4, 12], 2, "contiguous")
    [64, 96]
    """
    length = dict(zip(accumulate((0, *documents)), documents, strict=False))
    return [
        sum(
            (stop - start) * length[document]
            for chunk in chunks
            for document, (start, stop) in split_by_document(documents, chunk)
        )
        for chunks in deal_chunks(documents, ranks, cp_order)
    ]


@lru_cache(1024)
def busiest_share(documents: tuple[int, ...], ranks: int, cp_order: str, *, causal: bool = True) -> float:
    """Return what the busiest rank computes, as a share of its tokens' scores with all tokens.

    >>> busiest_share((16,), 2, "contiguous"), busiest_share((16,), 2, "zigzag"), busiest_share((8, 8), 2, "zigzag")
    (0.75, 0.5, 0.25)
    >>> busiest_share((4, 12), 2, "contiguous", causal=False)
    0.75

    Args:
        documents, ranks, cp_order: as for `attention_work`.
        causal: whether a token attends only to those before it in its document, and to half of itself.
    """
    s = sum(documents)
    if causal:
        return (max(attention_work(documents, ranks, cp_order)) - s / ranks / 2) * ranks / s**2
    return max(whole_work(documents, ranks, cp_order)) * ranks / s**2


@lru_cache(1024)
def best_order(documents: tuple[int, ...], ranks: int, orders: tuple[str, ...]) -> str:
    """Return the order in which the busiest rank has least to compute: the first of those that are as good.

    >>> orders = ("contiguous", "zigzag", "documents", "balanced")
    >>> best_order((4, 12), 2, orders), best_order((5, 11), 2, orders), best_order((4, 12), 1, orders)
    ('documents', 'balanced', 'contiguous')

    Args:
        documents, ranks: as for `attention_work`.
        orders: those that the software has.
    """
    if ranks == 1:
        return CONTIGUOUS
    shares: dict[str, float] = {}
    for order in orders:
        try:
            shares[order] = busiest_share(documents, ranks, order)
        except ValueError:  # this order cannot divide each document
            continue
    return min(shares, key=shares.__getitem__)


def describe_documents(documents: tuple[int, ...], ranks: int, cp_order: str) -> str:
    """Return in words what is packed in each sequence, and what its ranks compute of that.

    >>> print(describe_documents((4, 12), 2, "contiguous"))
    2 per sequence, of 4 to 12 tokens: 62% of one document's attention; the busiest rank has 1.60 times the mean

    Args:
        documents, ranks, cp_order: as for `attention_work`.
    """
    s = sum(documents)
    less = sum(length**2 for length in documents) / s**2
    words = (
        f"{len(documents)} per sequence, of {min(documents)} to {max(documents)} tokens: {less:.0%} of one document's "
        "attention"
    )
    if ranks == 1:
        return words
    times = 2 * busiest_share(documents, ranks, cp_order) / less
    return f"{words}; the busiest rank has {times:.2f} times the mean"

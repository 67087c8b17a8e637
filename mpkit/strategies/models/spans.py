"""Where a model's forward is inside of which span, found from the order of its calls.

A stage that begins in the middle of a span, since a pipeline cuts through it, has not seen the span begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["ForwardSpan", "spans_at"]


class ForwardSpan(NamedTuple):
    """A stretch of a model's forward, from the start of one module to the end of another.

    Attributes:
        name: differs for each rank that draws its own numbers.
        first, last: names of the modules.
    """

    name: str
    first: str
    last: str


def spans_at(calls: Sequence[tuple[str, bool]], spans: Sequence[ForwardSpan]) -> list[tuple[str, ...]]:
    """Return the spans in which each call of a forward begins, the outer ones first.

    >>> calls = [(name, True) for name in ("norm", "mlp.up", "mlp.drop", "mlp.down", "drop")]
    >>> spans_at(calls, [ForwardSpan("mlp on 0", "mlp.up", "mlp.down")])
    [(), ('mlp on 0',), ('mlp on 0',), ('mlp on 0',), ()]

    Args:
        calls: in their order, the name of a module that is called as a whole, with True; and of an operation between
            these, the name of the module in whose forward it is, with False.
        spans: the spans.
    """
    found: list[tuple[str, ...]] = [()] * len(calls)
    for name, first, last in spans:
        inside = ending = left = False
        begun_by = None
        for i, (call, whole) in enumerate(calls):
            if inside and ending and not _is_within(call, last):
                inside, left = False, False
            left = left or not _is_within(call, first)
            if (
                not inside
                and _is_within(call, first)
                and (begun_by is None or left or (call, whole) == begun_by)
            ):
                inside, ending = True, False
                begun_by = (call, whole) if whole else None
            if inside:
                found[i] += (name,)
                ending = ending or _is_within(call, last)
                inside = not (whole and _is_within(last, call) and last != call)
            elif whole and _is_within(first, call) and not _is_within(last, call):
                inside, ending = True, False
    return found


def _is_within(name: str, module: str) -> bool:
    """Return whether a name is a module's, or of something inside it."""
    return not module or name == module or name.startswith(f"{module}.")

"""What budgets are about, read from the trace of an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpkit.classroom.seen import Seen
from mpkit.trace import CATEGORIES, Kind, Lane

__all__ = ["calls", "collectives", "makespan", "messages", "payload", "peak", "sent"]


def sent(seen: Seen) -> float:
    """Bytes of messages that the busiest rank sends."""
    return _most(seen, lambda ops: ops["bytes"][ops["kind"] == Kind.SEND].sum())


def messages(seen: Seen) -> float:
    """Messages that the busiest rank sends."""
    return _most(seen, lambda ops: (ops["kind"] == Kind.SEND).sum())


def collectives(seen: Seen) -> float:
    """Collectives that the busiest rank takes part in."""
    return _most(seen, lambda ops: _collective(ops).sum())


def calls(kind: Kind) -> Callable[[Seen], float]:
    """Collectives of one kind that the busiest rank takes part in."""
    return lambda seen: _most(seen, lambda ops: (ops["kind"] == kind).sum())


def payload(seen: Seen) -> float:
    """Bytes of all collectives that the busiest rank takes part in; of an all-reduce those of the tensor."""
    return _most(seen, lambda ops: ops["bytes"][_collective(ops)].sum())


def peak(*categories: str) -> Callable[[Seen], float]:
    """Bytes that the fullest rank held of these categories together, at most; of all, if none is named."""
    chosen = categories or CATEGORIES

    def of(seen: Seen) -> float:
        return float(max(sum(held[category] for category in chosen) for held in seen.timeline.peak_memory))

    return of


def makespan(seen: Seen) -> float:
    """Seconds from the first op to the last, on the virtual clock."""
    return float(seen.timeline.makespan)


def _collective(ops: Any) -> Any:
    return (ops["lane"] == Lane.COMM) & ~np.isin(ops["kind"], (Kind.SEND, Kind.RECV, Kind.BARRIER))


def _most(seen: Seen, of: Callable[[Any], Any]) -> float:
    assert seen.trace is not None, "nothing was recorded"
    return float(max(of(rank.ops) for rank in seen.trace.ranks))

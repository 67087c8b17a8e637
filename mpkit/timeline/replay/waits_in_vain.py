"""Ranks that wait in vain at the end of a trace: for whom, and since when. Views draw that wait to their edge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpkit.timeline.replay.rank import RankReplay
from mpkit.trace import Kind

__all__ = ["waiting_ranks"]


def waiting_ranks(ranks: Sequence[RankReplay]) -> list[dict[str, Any]]:
    """Return {"rank", "start" in seconds, "words"} of each rank that waits in vain.

    >>> waiting_ranks([])
    []
    """
    stuck = [(this, where) for this in ranks if (where := this.current_wait()) is not None]
    there: dict[tuple[str, int], set[int]] = {}
    for this, (_, op) in stuck:
        there.setdefault((this.group_of(op), int(op["kind"])), set()).add(this.rank)
    return [
        {
            "rank": this.rank,
            "start": start,
            "words": _words(op, this.group_of(op), there[this.group_of(op), int(op["kind"])]),
        }
        for this, (start, op) in stuck
    ]


def _words(op: Any, group: str, there: set[int]) -> str:
    """Say for whom a rank waits: the peer of a message, or the members of a group that have not come."""
    kind = Kind(int(op["kind"]))
    word = kind.word.replace("_", " ")
    if kind in (Kind.SEND, Kind.RECV):
        return f"waits for rank {op['peer']} ({word})"
    members = [int(rank) for rank in group.split(",")] if group.replace(",", "").isdigit() else []
    missing = [str(rank) for rank in members if rank not in there]
    if not missing:
        return f"waits in {word}"
    return f"waits for rank{'s' * (len(missing) > 1)} {', '.join(missing)} ({word})"

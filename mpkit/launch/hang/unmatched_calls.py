"""Find communication in the ranks' traces that will not complete: mismatched calls, and ranks that have not arrived.

first_mismatch     two ranks' ends of one communication that do not match: the error to raise
waited_for         the communication that a rank waits for
missing            the ranks that have not reached it
never              ranks that can never proceed, however long they are given
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpkit.common.tracebacks import in_cells
from mpkit.errors import CommMismatch
from mpkit.trace import Kind, RankTrace, Trace
from mpkit.trace.mismatch import IssuedCall, find_issued, fits, why_not

__all__ = ["first_mismatch", "members", "missing_ranks", "never", "unanswered_calls", "waited_for"]

FROM_ROOT = (Kind.BROADCAST, Kind.SCATTER)
TO_ROOT = (Kind.REDUCE, Kind.GATHER)


def first_mismatch(trace: Trace) -> CommMismatch | None:
    """Return the error of the earliest pending communication that does not match a peer's; None if all match."""
    earliest = None
    for rank, recorded in enumerate(trace.ranks):
        for start, mine in _open(rank, recorded):
            if earliest is not None and start >= earliest[0]:
                continue
            for other in members(mine):
                theirs = find_issued(other, trace.ranks[other], mine.group, mine.number)
                if other != rank and theirs is not None and not fits(mine, theirs):
                    earliest = start, mine, theirs, recorded
                    break
    if earliest is None:
        return None
    _, mine, theirs, recorded = earliest
    last = recorded.ops[-1]
    place = {key: int(last[key]) if last[key] >= 0 else None for key in ("step", "stage", "microbatch")}
    return CommMismatch(in_cells(why_not(mine, theirs)), rank=mine.rank, other=theirs.rank, **place)


def _open(rank: int, recorded: RankTrace) -> Iterator[tuple[int, IssuedCall]]:
    """Yield what a rank has issued and not seen completed, each with its start time."""
    ops = recorded.ops
    kind = ops["kind"]
    issues = ((kind >= 32) & (kind < 64)) | ((kind == Kind.WAIT) & (ops["number"] >= 0))
    for op in ops[np.flatnonzero(issues & (ops["end"] == 0))]:
        yield int(op["start"]), IssuedCall.from_record(rank, recorded, op)


def members(call: IssuedCall) -> list[int]:
    """Return the ranks that take part in a call; none if the trace was cut before its group's name."""
    if call.is_message:
        return sorted((call.rank, call.peer))
    return [int(rank) for rank in call.group.split(",") if rank.isdigit()]


def waited_for(rank: int, recorded: RankTrace) -> IssuedCall | None:
    """Return the communication that a rank waits for, or None if it is doing something else."""
    if recorded.state == "finished" or not len(recorded.ops):
        return None
    last = recorded.ops[-1]
    if last["kind"] != Kind.WAIT or last["end"] != 0:
        return None
    if last["ref"] >= 0:
        return IssuedCall.from_record(rank, recorded, recorded.ops[last["ref"]])
    return IssuedCall.from_record(rank, recorded, last) if last["number"] >= 0 else None


def unanswered_calls(rank: int, trace: Trace) -> list[IssuedCall]:
    """Return what a rank has issued and some other rank has not reached, the newest first."""
    return [call for _, call in reversed(list(_open(rank, trace.ranks[rank]))) if missing_ranks(call, trace)]


def missing_ranks(call: IssuedCall, trace: Trace) -> list[int]:
    """Return the ranks of a call that have not reached it, or whose own call does not match and was not started."""
    others = [rank for rank in members(call) if rank != call.rank]
    theirs = [find_issued(rank, trace.ranks[rank], call.group, call.number) for rank in others]
    return [rank for rank, each in zip(others, theirs, strict=True) if each is None or not fits(call, each)]


def never(trace: Trace) -> set[int]:
    """Return ranks that can never proceed, each waiting for one that itself waits or has finished.

    Where all ranks wait or have finished, none of these can proceed. A rank whose collective may complete before all
    members have reached it (the root of a broadcast, a non-root rank of a reduction) is not included for certain.
    """
    waits = {rank: waited_for(rank, recorded) for rank, recorded in enumerate(trace.ranks)}
    done = {rank for rank, recorded in enumerate(trace.ranks) if recorded.state == "finished"}
    stuck = done | {rank for rank, call in waits.items() if call is not None}
    needs = {rank: _needs(call, trace) for rank, call in waits.items() if call is not None}
    while True:
        moving = {rank for rank in stuck - done if not needs[rank] & stuck}
        if not moving:
            return stuck - done
        stuck -= moving


def _needs(call: IssuedCall, trace: Trace) -> set[int]:
    """Return the ranks that this call cannot complete without and that have not reached it."""
    absent = set(missing_ranks(call, trace))
    if len(members(call)) == 2:  # nothing is delivered to a rank that has not posted a receive
        return absent
    if call.kind in FROM_ROOT:
        return absent & {call.peer} if call.rank != call.peer else set()
    if call.kind in TO_ROOT:
        return absent if call.rank == call.peer else set()
    return absent

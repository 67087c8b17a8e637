"""What each rank is doing, from its newest records, and which communication will never complete.

RankWatch          observes ranks from outside while they run, by reading their memory-mapped files
first_mismatch     two ranks' ends of one communication that do not match: the error to raise
waited_for         the communication that a rank waits for
missing_ranks      the ranks that have not reached it
never              ranks that can never proceed, however long they are given
"""

import mmap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.common.launch_folder import part
from mpkit.common.tracebacks import in_cells
from mpkit.errors import CommMismatch
from mpkit.trace import HEADER, OP, Kind, RankTrace, Trace
from mpkit.trace.mismatch import IssuedCall, find_issued, fits, why_not

FINISHED = 1  # the state of a rank


@dataclass(frozen=True)
class Sight:
    """A rank's state at one moment; `count` or `end` changes whenever the rank makes progress."""

    count: int = 0  # ops begun so far
    state: int = 0  # 0 running, 1 finished, 2 failed
    waiting: bool = False  # the newest op is a WAIT that has not ended
    end: int = 0  # of the newest op
    started: bool = True  # it has met the others and records; before, it is starting, however long that takes


class RankWatch:
    """Watches all ranks of a launch. It maps each file once, and each look reads two records of it.

    `local` has the ranks that write there, under a launcher on several nodes; the others count as finished.
    """

    def __init__(self, folder: Path, ranks: int, local: Collection[int]) -> None:
        self._folder, self._local = folder, local
        self._maps: list[mmap.mmap | None] = [None] * ranks

    def _map(self, rank: int, anew: bool = False) -> mmap.mmap | None:
        if self._maps[rank] is None or anew:
            try:
                with part(self._folder, rank, "ops").open("rb") as file:
                    self._maps[rank] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (FileNotFoundError, ValueError):  # it does not exist yet, or is still empty
                return None
        return self._maps[rank]

    def look(self, rank: int) -> Sight:
        """Return the present state of one rank."""
        if rank not in self._local:  # nothing is known of it, and nobody here decides about it
            return Sight(state=FINISHED)
        data = self._map(rank)
        if data is None or len(data) < HEADER.itemsize:
            return Sight(started=False)
        head = np.frombuffer(data, HEADER, 1)[0]
        if (count := int(head["count"])) == 0:
            return Sight(state=int(head["state"]))
        place = HEADER.itemsize + (count - 1) * OP.itemsize
        if place + OP.itemsize > len(data):  # the file has grown since it was mapped
            data = self._map(rank, anew=True)
            if data is None or place + OP.itemsize > len(data):
                return Sight(count=count)
        last: Any = np.frombuffer(data, OP, 1, place)[0]
        # Plain ints: when comparing a numpy scalar with an enum, numpy swallows a Ctrl-C that arrives meanwhile.
        kind, end = int(last["kind"]), int(last["end"])
        return Sight(count, int(head["state"]), kind == Kind.WAIT and end == 0, end)

    def look_at_all(self) -> tuple[Sight, ...]:
        """Return the present state of every rank."""
        return tuple(self.look(rank) for rank in range(len(self._maps)))

    def close(self) -> None:
        """Release all files, once the ranks have exited."""
        self._maps = [None] * len(self._maps)


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
    place = place_of_op(recorded.ops[-1])
    return CommMismatch(in_cells(why_not(mine, theirs)), rank=mine.rank, other=theirs.rank, **place)


def place_of_op(op: Any) -> dict[str, Any]:
    """Return the step, stage and micro-batch of an op, as an error has them; None where there is none."""
    return {key: int(op[key]) if op[key] >= 0 else None for key in ("step", "stage", "microbatch")}


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
    if call.kind in (Kind.BROADCAST, Kind.SCATTER):  # from the root
        return absent & {call.peer} if call.rank != call.peer else set()
    if call.kind in (Kind.REDUCE, Kind.GATHER):  # to the root
        return absent if call.rank == call.peer else set()
    return absent

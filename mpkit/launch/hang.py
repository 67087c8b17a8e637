"""Do the ranks wait for each other for ever, and who for whom?

Ranks hang when every one of them waits (its newest op is an open WAIT) or has finished, and none moves. A rank that
computes is given all the time it wants, unless a time-out was asked for. How long "none moves" must last is taken
from the run itself: a few seconds more than the slowest op seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mpkit.launch.watch import Sight
from mpkit.trace import Kind, RankTrace, Trace

__all__ = ["GRACE", "Patience", "explain"]

GRACE = 4.0
"""Seconds past the slowest op seen before ranks that only wait are given up."""


@dataclass
class Patience:
    """Says when to give up.

    Args:
        timeout: seconds without any rank moving, whatever they do; None: `grace` past the slowest op, and
            only if all wait.
        grace: seconds.
    """

    timeout: float | None = None
    grace: float = GRACE
    _seen: tuple[Sight, ...] = ()
    _since: float = field(default_factory=time.monotonic)

    @property
    def still(self) -> float:
        """Seconds since a rank has last moved."""
        return time.monotonic() - self._since

    def is_over(self, sights: tuple[Sight, ...], trace: Trace | None = None) -> bool:
        """Look again. `trace` is wanted only once nobody has moved for `grace`, to know the slowest op."""
        if sights != self._seen:
            self._seen, self._since = sights, time.monotonic()
            return False
        still = self.still
        if self.timeout is not None:
            return still > self.timeout
        stuck = all(s.waiting or s.state == 1 for s in sights) and any(s.waiting for s in sights)
        return stuck and still > self.grace and trace is not None and still > self.grace + slowest(trace)

    def wants_trace(self, sights: tuple[Sight, ...]) -> bool:
        """Whether `is_over` needs the trace to decide."""
        return self.timeout is None and sights == self._seen and self.still > self.grace


def slowest(trace: Trace) -> float:
    """Seconds that the slowest finished op of a compute lane took, waits left out."""
    longest = 0
    for rank in trace.ranks:
        ops = rank.ops[(rank.ops["end"] > 0) & (rank.ops["kind"] < Kind.WAIT)]
        if len(ops):
            longest = max(longest, int((ops["end"] - ops["start"]).max()))
    return longest / 1e9


def explain(trace: Trace, stacks: dict[int, str], seconds: float, now: int) -> str:
    """The message: who waits where, which rank never came, what the others were doing.

    Args:
        trace: of all ranks, as it stands.
        stacks: Python stacks of ranks that are not waiting, by rank, as far as they could be had.
        seconds: how long nobody had moved.
        now: ns of the monotonic clock.
    """
    lines = [f"the ranks wait for each other: none has moved for {seconds:.1f} s."]
    lines += ["  " + line for line in _each_rank(trace, stacks, now)]
    culprits = sorted({line for line in _diagnoses(trace)})
    if culprits:
        lines += ["Why:", *("  " + line for line in culprits)]
    lines.append(
        "(A step that is only slow? Give it time: cluster.run(fn, timeout=60), or train(..., timeout=60).)"
    )
    return "\n".join(lines)


def _each_rank(trace: Trace, stacks: dict[int, str], now: int) -> Iterator[str]:
    for number, rank in enumerate(trace.ranks):
        waits = _waits_for(rank)
        if rank.state == "finished":
            yield f"rank {number} has finished"
        elif waits is not None:
            since = (now - int(rank.ops[-1]["start"])) / 1e9
            yield f"rank {number} waits in {_spell(rank, waits)}{_at(rank, waits)}, for {since:.1f} s"
        else:
            yield f"rank {number} is not waiting{_doing(rank)}"
            if stacks.get(number):
                yield from ("    " + line for line in stacks[number].strip().splitlines())


def _diagnoses(trace: Trace) -> Iterator[str]:
    """For each op waited for: who has not come, or came with something else."""
    for number, rank in enumerate(trace.ranks):
        op = _waits_for(rank)
        if op is None:
            continue
        group = rank.name(int(op["group"]))
        if ">" in group:
            peer = int(op["peer"])
            other = Kind.SEND if op["kind"] == Kind.RECV else Kind.RECV
            if not _has(trace.ranks[peer], group, int(op["number"]), other):
                done = "never sent it" if op["kind"] == Kind.RECV else "never received it"
                yield (
                    f"rank {number} waits for message {group} number {op['number']}; "
                    f"rank {peer} {done}{_and(trace.ranks[peer])}"
                )
            continue
        for member in map(int, group.split(",")):
            theirs = _collective(trace.ranks[member], group, int(op["number"]))
            if theirs is None:
                yield (f"rank {member} never came to {_spell(rank, op)}{_and(trace.ranks[member])}")
            elif theirs["kind"] != op["kind"]:
                pair = sorted([(number, _spell(rank, op)), (member, _spell(trace.ranks[member], theirs))])
                yield (
                    f"ranks call different collectives as number {op['number']} of their group: "
                    + ", ".join(f"rank {r} {what}" for r, what in pair)
                )


def _waits_for(rank: RankTrace) -> Any:
    """The communication op that this rank waits for, or None if it does something else."""
    if rank.state == "finished" or not len(rank.ops):
        return None
    last = rank.ops[-1]
    if last["kind"] != Kind.WAIT or last["end"] != 0 or last["ref"] < 0:
        return None
    return rank.ops[last["ref"]]


def _has(rank: RankTrace, group: str, number: int, kind: Kind) -> bool:
    return any(
        rank.name(int(op["group"])) == group
        for op in rank.ops[(rank.ops["kind"] == kind) & (rank.ops["number"] == number)]
    )


def _collective(rank: RankTrace, group: str, number: int) -> Any:
    for op in rank.ops[rank.ops["number"] == number]:
        if rank.name(int(op["group"])) == group:
            return op
    return None


def _spell(rank: RankTrace, op: Any) -> str:
    kind, group = Kind(int(op["kind"])).word, rank.name(int(op["group"]))
    if ">" in group:
        source, tag = group.split(">")[0], group.split("#")[-1]
        towards = f"to rank {op['peer']}" if op["kind"] == Kind.SEND else f"from rank {source}"
        return f"{kind} {towards} (tag {tag}, number {op['number']})"
    return f"{kind} number {op['number']} of ranks {group}"


def _at(rank: RankTrace, op: Any) -> str:
    where = rank.name(int(op["where"]))
    return f" at {where}" if where else ""


def _doing(rank: RankTrace) -> str:
    if not len(rank.ops):
        return "; it has recorded nothing yet"
    last = rank.ops[-1]
    verb = "in" if last["end"] == 0 else "last seen at the end of"
    return f"; {verb} {Kind(int(last['kind'])).word} {rank.name(int(last['name']))}".rstrip()


def _and(rank: RankTrace) -> str:
    waits = _waits_for(rank)
    if rank.state == "finished":
        return ": it has finished"
    if waits is not None:
        return f": it waits in {_spell(rank, waits)}{_at(rank, waits)}"
    return ": it is still busy elsewhere"

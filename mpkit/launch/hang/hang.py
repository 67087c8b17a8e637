"""Decide whether the ranks wait for each other forever, and explain which rank waits for which.

Ranks hang when every one of them waits (its newest op is an open WAIT) or has finished, and none makes progress. A
rank that computes may take as long as it needs, unless a timeout was requested. If the trace proves that no rank can
proceed, the launch is given up soon; otherwise the required time without progress is derived from the run itself: a
few seconds more than the slowest op seen.

Time is counted from look to look. A look that comes late, after a pause of the whole machine, counts as two at most;
and without a timeout, a look that finds a rank running (`RankProcesses.running_ranks`) does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from mpkit.common.tracebacks import fold_stack, in_cells
from mpkit.launch.hang.progress import FINISHED, Sight
from mpkit.launch.hang.stragglers import stopped_words
from mpkit.launch.hang.unmatched_calls import missing_ranks, never, unanswered_calls, waited_for
from mpkit.trace import Kind, RankTrace, Trace
from mpkit.trace.mismatch import SHARDED, IssuedCall

__all__ = ["GRACE", "LIMIT", "LOOK_EVERY", "Patience", "explain", "reasons"]


LOOK_EVERY = 0.1
"""Seconds between two checks of the ranks' progress."""

GRACE = 4.0
"""Seconds beyond the slowest op seen before ranks that only wait are given up."""

LIMIT = 600.0
"""Seconds without progress before ranks are given up that neither compute nor wait in a recorded op."""

CERTAIN = 0.5
"""Seconds before ranks are given up that can never proceed: they wait for each other, or for one that finished."""


@dataclass
class Patience:
    """Decides when to give up.

    Args:
        timeout: seconds without progress of any rank once all have started, whatever they do; None: in which none runs
            either: `grace` beyond the slowest op if all wait or are stopped, else `LIMIT`.
        grace: seconds; halved if a rank has not reached the call that another one waits for, and replaced by
            `CERTAIN` if it can never reach it.
        look_every: seconds between two looks.
        now: the clock, in seconds.
    """

    timeout: float | None = None
    grace: float = GRACE
    look_every: float = LOOK_EVERY
    now: Callable[[], float] = time.monotonic
    knows_all: bool = True  # whether it sees all ranks, and not those of one node among several
    _seen: tuple[Sight, ...] = ()
    still: float = 0.0  # seconds since the last progress of any rank, as observed
    _idle: float = 0.0  # those of them in which no rank ran
    _looked: float | None = None
    _held: frozenset[int] = frozenset()  # ranks stopped by SIGSTOP
    _needed: float | None = None  # seconds without progress; None: not yet computed from the trace

    def is_over(
        self,
        sights: tuple[Sight, ...],
        trace: Trace | None = None,
        stopped: Collection[int] = (),
        running: Collection[int] = (),
    ) -> bool:
        """Look at the ranks again and return whether to give up.

        Args:
            sights: the sights of all ranks.
            trace: the trace, needed once ranks have only waited for a while (`wants_trace`).
            stopped: ranks stopped by SIGSTOP, which cannot proceed until someone continues them.
            running: ranks that the system reports as running.
        """
        now = self.now()
        since_last = 0.0 if self._looked is None else min(now - self._looked, 2 * self.look_every)
        self._looked = now
        if sights != self._seen or self._held != frozenset(stopped):
            self._seen, self._held, self._needed = sights, frozenset(stopped), None
            self.still = self._idle = 0.0
            return False
        self.still += since_last
        self._idle += 0.0 if running else since_last
        if trace is not None:
            self._needed = self._seconds(trace)
        limit = (
            self.timeout if all(sight.started for sight in sights) else None
        )  # not for how long ranks start
        if limit is not None and self.still > limit:
            return True
        limit = LIMIT if limit is None else limit
        return self._idle > (limit if self._needed is None else self._needed)

    def has_seen(self, sights: tuple[Sight, ...]) -> bool:
        """Return whether no rank has made progress since the last look."""
        return sights == self._seen

    def wants_trace(self, sights: tuple[Sight, ...]) -> bool:
        """Return whether `is_over` needs the trace to decide."""
        if not self.has_seen(sights) or self._needed is not None or self.still <= CERTAIN:
            return False
        held = [sight.waiting or rank in self._held for rank, sight in enumerate(sights)]
        return any(held) and all(one or s.state == FINISHED for one, s in zip(held, sights, strict=True))

    def _seconds(self, trace: Trace) -> float:
        """Return how many seconds ranks are given that all wait or have finished."""
        if not self._held and never(trace):
            return CERTAIN
        if self.timeout is not None or not self.knows_all:
            return self.timeout or LIMIT  # another node's ranks may compute
        waits = (waited_for(number, rank) for number, rank in enumerate(trace.ranks))
        unmet = any(missing_ranks(call, trace) for call in waits if call is not None)
        return (self.grace / 2 if unmet else self.grace) + slowest(trace)


def slowest(trace: Trace) -> float:
    """Return the seconds of the slowest finished op on a compute lane, not counting waits."""
    longest = 0
    for rank in trace.ranks:
        ops = rank.ops[(rank.ops["end"] > 0) & (rank.ops["kind"] < Kind.WAIT)]
        if len(ops):
            longest = max(longest, int((ops["end"] - ops["start"]).max()))
    return longest / 1e9


def explain(
    trace: Trace, stacks: dict[int, str], seconds: float, now: int, stopped: Mapping[int, int] | None = None,
    local: Collection[int] | None = None,
) -> str:  # fmt: skip
    """Return the message: which rank waits where, which never arrived, and what the others were doing.

    Args:
        trace: the trace of all ranks so far.
        stacks: Python stacks by rank of ranks that are not waiting, as far as available.
        seconds: the time without progress.
        now: the monotonic clock in ns.
        stopped: process ids by rank of ranks stopped by SIGSTOP.
        local: the ranks that the trace is of, under a launcher on several nodes; None for all.
    """
    here = range(trace.world_size) if local is None else local
    waits = any(waited_for(number, rank) is not None for number, rank in enumerate(trace.ranks))
    who = "ranks" if len(here) == trace.world_size else "ranks of this node"
    first = f"the {who} wait for each other: none" if waits else "no rank"
    lines = [f"{first} has moved for {seconds:.1f} s."]
    lines += ["  " + line for line in _each_rank(trace, here, stacks, now)]
    held = [f"{stopped_words(rank, pid)} lets it go on" for rank, pid in sorted((stopped or {}).items())]
    culprits = held or sorted(set(reasons(trace, here)))
    if culprits:
        lines += ["Why:", *("  " + line for line in culprits)]
    calls = [waited_for(number, rank) for number, rank in enumerate(trace.ranks)]
    if not held and sum(call is not None and call.is_sharding for call in calls) > 1:
        lines.append(SHARDED)
    if not never(trace):
        lines.append(
            "(A step that is only slow? Give it time: cluster.run(fn, timeout=60), or train(..., timeout=60).)"
        )
    return in_cells("\n".join(lines))


def _each_rank(trace: Trace, here: Collection[int], stacks: dict[int, str], now: int) -> Iterator[str]:
    for number in here:
        rank = trace.ranks[number]
        waits = waited_for(number, rank)
        if rank.state == "finished":
            yield f"rank {number} has finished"
        elif waits is not None:
            since = (now - int(rank.ops[-1]["start"])) / 1e9
            yield f"rank {number} waits in {waits}{waits.place_text}, for {since:.1f} s"
        else:
            yield f"rank {number} is not waiting{_describe_last(rank)}"
            if stacks.get(number):
                yield from ("    " + line for line in fold_stack(stacks[number]).splitlines())


def _describe_last(rank: RankTrace) -> str:
    if not len(rank.ops):
        return "; it has recorded nothing yet"
    running = rank.ops[rank.ops["end"] == 0]
    last = running[-1] if len(running) else rank.ops[-1]
    verb = "in" if len(running) else "last seen at the end of"
    return f"; {verb} {Kind(int(last['kind'])).word} {rank.name(int(last['name']))}".rstrip()


def reasons(trace: Trace, here: Collection[int] | None = None) -> Iterator[str]:
    """Yield, for each communication waited for, the ranks that have not reached it and where they are.

    Args:
        trace: the trace of all ranks so far.
        here: the ranks that it is of; None for all.
    """
    for rank, recorded in enumerate(trace.ranks):
        call = waited_for(rank, recorded)
        if call is None:
            continue
        for other in missing_ranks(call, trace):
            if here is not None and other not in here:
                yield f"rank {rank} waits for rank {other}, whose node says where it is"
                continue
            if call.is_message:
                done = "never sent it" if call.kind == Kind.RECV else "never received it"
                what = f"rank {rank} waits for message {call.group} number {call.number}; rank {other} {done}"
            else:
                what = f"rank {other} never came to {call}"
            yield f"{what}: {_describe_place(other, trace)}{_nearest(call, trace)}"


def _describe_place(rank: int, trace: Trace) -> str:
    recorded = trace.ranks[rank]
    waits = waited_for(rank, recorded)
    if recorded.state == "finished":
        return "it has finished"
    return f"it waits in {waits}{waits.place_text}" if waits is not None else "it is still busy elsewhere"


def _nearest(call: IssuedCall, trace: Trace) -> str:
    """Describe the other end's message that is most similar to the one waited for, if there is one."""
    if not call.is_message:
        return ""
    wanted = Kind.SEND if call.kind == Kind.RECV else Kind.RECV
    there = [other for other in unanswered_calls(call.peer, trace) if other.kind == wanted]
    same_ends = [other for other in there if other.peer == call.rank]
    same_tag = [other for other in there if other.tag == call.tag]
    for other in (same_ends or same_tag)[:1]:
        sends = other.kind == Kind.SEND
        verb, nobody = ("sent", "receives") if sends else ("receives", "sends")
        return (
            f". Instead it {verb} {other.tensor_text} {'to' if sends else 'from'} rank {other.peer} "
            f"with tag {other.tag}{other.place_text}, which rank {other.peer} never {nobody}"
        )
    return ""

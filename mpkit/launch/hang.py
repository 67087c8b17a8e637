"""Do the ranks wait for each other for ever, and who for whom?

Ranks hang when every one of them waits (its newest op is an open WAIT) or has finished, and none moves. A rank that
computes is given all the time it wants, unless a time-out was asked for. Where the trace proves that they cannot move
any more, that is soon; else how long "none moves" must last is taken from the run itself: a few seconds more than the
slowest op seen.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from mpkit.launch.cells import in_cells
from mpkit.launch.unmatched import missing, never, waited_for
from mpkit.launch.waiting import stopped_words
from mpkit.launch.watch import Sight
from mpkit.launch.why import reasons
from mpkit.trace import Kind, RankTrace, Trace
from mpkit.tracebacks import fold_stack

__all__ = ["GRACE", "LIMIT", "Patience", "explain"]

GRACE = 4.0
"""Seconds past the slowest op seen before ranks that only wait are given up."""

LIMIT = 600.0
"""Seconds without any rank moving before ranks are given up of which one may still move: rank 0 may evaluate."""

CERTAIN = 0.5
"""Seconds before ranks are given up that cannot move any more: they wait for each other, or for one that finished."""


@dataclass
class Patience:
    """Says when to give up.

    Args:
        timeout: seconds without any rank moving, whatever they do; None: `grace` past the slowest op where
            all wait or are stopped, `LIMIT` where some rank may move.
        grace: seconds; half of it where a rank has not come to what another one waits for, and `CERTAIN` where it
            cannot come any more.
    """

    timeout: float | None = None
    grace: float = GRACE
    _seen: tuple[Sight, ...] = ()
    still: float = 0.0  # seconds since a rank has last moved, as far as somebody looked
    _looked: float = field(default_factory=time.monotonic)
    _held: frozenset[int] = frozenset()  # ranks that SIGSTOP holds
    _needed: float | None = None  # seconds of stillness; None: the trace has not been asked yet

    def is_over(
        self, sights: tuple[Sight, ...], trace: Trace | None = None, stopped: Collection[int] = ()
    ) -> bool:
        """Look again.

        Args:
            sights: of all ranks.
            trace: wanted once ranks have only waited for a while (`wants_trace`).
            stopped: ranks that SIGSTOP holds, and that cannot move before somebody lets them.
        """
        now = time.monotonic()
        # Of a pause of this process itself (a container that is frozen) one second counts.
        since_last, self._looked = min(now - self._looked, 1.0), now
        if sights != self._seen or self._held != frozenset(stopped):
            self._seen, self._held, self.still, self._needed = sights, frozenset(stopped), 0.0, None
            return False
        self.still += since_last
        if trace is not None:
            self._needed = self._seconds(trace)
        limit = LIMIT if self.timeout is None else self.timeout
        return self.still > min(limit, limit if self._needed is None else self._needed)

    @property
    def holds(self) -> bool:
        """Whether some rank was stopped at the last look."""
        return bool(self._held)

    def wants_trace(self, sights: tuple[Sight, ...]) -> bool:
        """Whether `is_over` needs the trace to decide."""
        if sights != self._seen or self._needed is not None or self.still <= CERTAIN:
            return False
        held = [sight.waiting or rank in self._held for rank, sight in enumerate(sights)]
        return any(held) and all(one or s.state == 1 for one, s in zip(held, sights, strict=True))

    def _seconds(self, trace: Trace) -> float:
        """How long ranks that all wait, or have finished, are given."""
        if not self._held and never(trace):
            return CERTAIN
        if self.timeout is not None:
            return self.timeout
        waits = (waited_for(number, rank) for number, rank in enumerate(trace.ranks))
        unmet = any(missing(call, trace) for call in waits if call is not None)
        return (self.grace / 2 if unmet else self.grace) + slowest(trace)


def slowest(trace: Trace) -> float:
    """Seconds that the slowest finished op of a compute lane took, waits left out."""
    longest = 0
    for rank in trace.ranks:
        ops = rank.ops[(rank.ops["end"] > 0) & (rank.ops["kind"] < Kind.WAIT)]
        if len(ops):
            longest = max(longest, int((ops["end"] - ops["start"]).max()))
    return longest / 1e9


def explain(
    trace: Trace, stacks: dict[int, str], seconds: float, now: int, stopped: Mapping[int, int] | None = None
) -> str:
    """The message: who waits where, which rank never came, what the others were doing.

    Args:
        trace: of all ranks, as it stands.
        stacks: Python stacks of ranks that are not waiting, by rank, as far as they could be had.
        seconds: how long nobody had moved.
        now: ns of the monotonic clock.
        stopped: ranks that SIGSTOP holds, and their process ids.
    """
    waits = any(waited_for(number, rank) is not None for number, rank in enumerate(trace.ranks))
    first = "the ranks wait for each other: none" if waits else "no rank"
    lines = [f"{first} has moved for {seconds:.1f} s."]
    lines += ["  " + line for line in _each_rank(trace, stacks, now)]
    held = [f"{stopped_words(rank, pid)} lets it go on" for rank, pid in sorted((stopped or {}).items())]
    culprits = held or sorted(set(reasons(trace)))
    if culprits:
        lines += ["Why:", *("  " + line for line in culprits)]
    if not never(trace):
        lines.append(
            "(A step that is only slow? Give it time: cluster.run(fn, timeout=60), or train(..., timeout=60).)"
        )
    return in_cells("\n".join(lines))


def _each_rank(trace: Trace, stacks: dict[int, str], now: int) -> Iterator[str]:
    for number, rank in enumerate(trace.ranks):
        waits = waited_for(number, rank)
        if rank.state == "finished":
            yield f"rank {number} has finished"
        elif waits is not None:
            since = (now - int(rank.ops[-1]["start"])) / 1e9
            yield f"rank {number} waits in {waits}{waits.at}, for {since:.1f} s"
        else:
            yield f"rank {number} is not waiting{_doing(rank)}"
            if stacks.get(number):
                yield from ("    " + line for line in fold_stack(stacks[number]).splitlines())


def _doing(rank: RankTrace) -> str:
    if not len(rank.ops):
        return "; it has recorded nothing yet"
    last = rank.ops[-1]
    verb = "in" if last["end"] == 0 else "last seen at the end of"
    return f"; {verb} {Kind(int(last['kind'])).word} {rank.name(int(last['name']))}".rstrip()

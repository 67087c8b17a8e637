"""Whether the ranks of a launch wait for each other forever; which ranks others wait for; and both in words.

    Patience     decides when to give up
    HangWatch    looks at the ranks again and again; shows a notice of ranks for which others have waited long, which is
                 not an error, since a rank may compute for as long as it needs; returns the error of a hang
    explain      which rank waits where, which never arrived, and what the others were doing

Ranks hang when every one of them waits (its newest op is an open WAIT), has finished or is stopped, and none makes
progress. If the trace proves that no rank can proceed, the launch is given up soon.

Time is counted from look to look. A look that comes late, after a pause of the whole machine, counts as two at most;
and without a timeout, a look that finds a rank running (`RankProcesses.running_ranks`) does not count.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from mpkit.common.tracebacks import fold_stack, in_cells
from mpkit.errors import CommMismatch, Deadlock
from mpkit.launch.hang.waits import (
    FINISHED,
    RankWatch,
    Sight,
    first_mismatch,
    missing_ranks,
    never,
    unanswered_calls,
    waited_for,
)  # fmt: skip
from mpkit.launch.process.processes import RankProcesses, ask_stacks, cpu_seconds, place_of
from mpkit.plan.kinds import real
from mpkit.trace import Kind, RankTrace, Trace
from mpkit.trace.mismatch import SHARDED, IssuedCall

Sights: TypeAlias = tuple[Sight, ...]  # by rank

# Seconds between two checks of the ranks' progress, and seconds before mpkit gives up ranks
LOOK_EVERY = 0.1
CERTAIN = 0.5  # that can never proceed: they wait for each other, or for one that finished
WAITING = 30.0  # that all wait or are stopped, and may yet proceed
LIMIT = 600.0  # that make no progress, and neither compute nor wait in a recorded op


def check_timeout(timeout: Any) -> float | None:
    """Return the timeout in seconds if it is valid."""
    seconds = real(timeout)
    if timeout is not None and (seconds is None or not seconds > 0):
        raise ValueError(f"timeout={timeout!r}: a number of seconds above 0, such as timeout=60, or None")
    return seconds


@dataclass
class Patience:
    """Decides when to give up.

    With a `timeout`: after so many seconds without progress of any rank once all have started, whatever they do.
    Without: after seconds in which none runs either, `WAITING` if all wait or are stopped, else `LIMIT`. With or
    without: after `CERTAIN` if none can proceed.
    """

    timeout: float | None = None
    knows_all: bool = True  # whether it sees all ranks, and not those of one node among several
    look_every: float = LOOK_EVERY
    now: Callable[[], float] = time.monotonic
    still: float = 0.0  # seconds since the last observed progress of any rank
    _seen: Sights = ()
    _idle: float = 0.0  # seconds of `still` in which no rank ran
    _looked: float | None = None
    _held: frozenset[int] = frozenset()  # ranks stopped by SIGSTOP
    _needed: float | None = None  # seconds without progress; None: not yet computed from the trace

    def is_over(
        self, sights: Sights, trace: Trace | None = None, stopped: Collection[int] = (),
        running: Collection[int] = (),
    ) -> bool:  # fmt: skip
        """Look at the ranks again and return whether to give up.

        `trace` is needed once ranks have only waited for a while (`wants_trace`). `stopped` ranks (SIGSTOP) cannot
        proceed until someone continues them; the system reports `running` ranks as running.
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
            proved = not self._held and never(trace)
            self._needed = CERTAIN if proved else self.timeout or (WAITING if self.knows_all else LIMIT)
        have_started = all(sight.started for sight in sights)  # for that, ranks may take as long as they need
        if self.timeout is not None and have_started and self.still > self.timeout:
            return True
        return self._idle > (self._needed or (have_started and self.timeout) or LIMIT)

    def has_seen(self, sights: Sights) -> bool:
        """Return whether no rank has made progress since the last look."""
        return sights == self._seen

    def wants_trace(self, sights: Sights) -> bool:
        """Return whether `is_over` needs the trace to decide."""
        if not self.has_seen(sights) or self._needed is not None or self.still <= CERTAIN:
            return False
        held = [sight.waiting or rank in self._held for rank, sight in enumerate(sights)]
        return any(held) and all(one or s.state == FINISHED for one, s in zip(held, sights, strict=True))


NOTICE_AFTER = 10.0  # seconds that ranks wait before the notice is printed
IDLE = 0.05  # share of a core below which a rank is considered not to compute
SAID_RANKS = 4  # the number of awaited ranks whose location is reported


class _LaunchSignals(Protocol):
    """What a HangWatch needs of a launch (`mpkit.launch.launch.RankLaunch`)."""

    @property
    def trace(self) -> Trace: ...
    def poll(self, wait: float) -> bool: ...
    def say(self, line: str) -> None: ...


class HangWatch:
    """Watches the ranks of one launch. `local` ranks write into `folder`: under a launcher, those of this node."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        processes: RankProcesses,
        timeout: float | None,
        local: Collection[int],
    ) -> None:
        self._local, self._processes = local, processes
        self._ask = partial(ask_stacks, folder, processes)
        self._patience = Patience(timeout, knows_all=len(self._local) == ranks)
        self._watch, self._after = RankWatch(folder, ranks, local), NOTICE_AFTER
        self._since: list[tuple[Sight, float]] = []  # by rank: the latest sight, and when it was first seen
        self._cpu: deque[tuple[float, list[float | None]]] = deque(maxlen=4)  # when, and CPU seconds by rank
        self._said: set[str] = set()
        self.woken: Collection[int] = ()  # ranks that say they have finished, and have a new request
        self.waiting_for: str | None = None  # the notice of a long wait, in words
        self._waited_for: list[int] = []  # the ranks that it is about

    @property
    def has_moved(self) -> bool:
        """Whether some rank had made progress when they were looked at last."""
        return self._patience.still == 0.0

    def look(self, launch: _LaunchSignals) -> bool:
        """Look at the ranks again, show a notice of a long wait, and return whether the ranks hang."""
        sights = tuple(
            replace(sight, state=0) if rank in self.woken and sight.state == FINISHED else sight
            for rank, sight in enumerate(self._watch.look_at_all())
        )
        trace = launch.trace if self._patience.wants_trace(sights) else None
        still = self._patience.has_seen(sights)
        stopped = self._processes.stopped_pids() if still else {}
        waits = [rank for rank, sight in enumerate(sights) if sight.waiting or sight.state == FINISHED]
        running = self._processes.running_ranks(waits) if still else set()
        if self._patience.is_over(sights, trace, stopped, running):
            return True
        waiting, others = self._waits(sights)
        if not others:
            self.waiting_for = None
        elif self.waiting_for is None or others != self._waited_for:
            self._notice(launch, waiting, others, sights)
        return False

    def _waits(self, sights: Sights) -> tuple[list[int], list[int]]:
        """Return (ranks that wait, ranks that they wait for), both empty as long as there is nothing to report."""
        now, pids = time.monotonic(), self._processes.pids
        before = self._since or [(sight, now) for sight in sights]
        self._since = [old if old[0] == new else (new, now) for old, new in zip(before, sights, strict=True)]
        if pids and (not self._cpu or now - self._cpu[-1][0] > self._after / 4):
            self._cpu.append((now, [cpu_seconds(pid) for pid in pids]))
        going = [rank for rank, sight in enumerate(sights) if sight.state == 0]
        long = [rank for rank in going if now - self._since[rank][1] > self._after]
        if waiting := [rank for rank in long if sights[rank].waiting]:
            others = [rank for rank in going if not sights[rank].waiting]
            return (waiting, others) if others else ([], [])
        if not pids or len(long) < len(going):
            return [], []
        idle = [rank for rank in going if (self._cpu_share(rank) or 0.0) < IDLE]
        starting = [rank for rank in going if not sights[rank].started]
        if starting and idle:
            return [rank for rank in idle if sights[rank].started] or starting, starting
        return (idle, [rank for rank in going if rank not in idle] or idle) if idle else ([], [])

    def _cpu_share(self, rank: int) -> float | None:
        """Return the number of cores that the rank has used lately; None where the system does not report it."""
        if not self._cpu:  # the ranks have just been started
            return None
        (then, before), now = self._cpu[0], time.monotonic()
        earlier, used = before[rank], cpu_seconds(self._processes.pids[rank])
        return None if earlier is None or used is None or now <= then else (used - earlier) / (now - then)

    def _notice(self, launch: _LaunchSignals, waiting: list[int], others: list[int], sights: Sights) -> None:
        if (stacks := self._ask(others, launch.poll)) is None:
            return
        stopped, self._waited_for = self._processes.stopped_pids(), others
        places = []
        for rank in others[:SAID_RANKS]:
            share, place = self._cpu_share(rank), place_of(stacks[rank])
            busy = "" if share is None else ", using CPU time" if share >= IDLE else ", using no CPU time"
            where = f"at {place}" if place else "in C code" if sights[rank].started else "starting"
            is_where = f"rank {rank} is {where}{busy}"
            places.append(stopped_words(rank, stopped[rank]) if rank in stopped else is_where)
        if len(others) > SAID_RANKS:
            places.append(f"{len(others) - SAID_RANKS} more")
        for_whom = f"for {spelt(others)}" if waiting != others else "and none uses CPU time"
        waited = f"{'has' if len(waiting) == 1 else 'have'} waited for {self._after:g} s"
        self.waiting_for = f"{spelt(waiting)} {waited} {for_whom}: {'; '.join(places)}"
        if self.waiting_for not in self._said:
            self._said.add(self.waiting_for)
            limit = self._patience.timeout or LIMIT
            idle = "" if self._patience.timeout else " without CPU time"
            launch.say(f"mpkit: {self.waiting_for}. (An error after {limit:g} s{idle}: timeout=...)")

    def verdict(self, launch: _LaunchSignals) -> CommMismatch | Deadlock | None:
        """Return the error of ranks that hang; None if the launch ends while they are asked where they are."""
        trace, now, stopped = launch.trace, time.monotonic_ns(), self._processes.stopped_pids()
        still = self._patience.still
        if (stacks := self._ask(list(self._local), launch.poll)) is None:
            return None
        return first_mismatch(trace) or Deadlock(explain(trace, stacks, still, now, stopped, self._local))

    def close(self) -> None:
        """Close the files that are watched."""
        self._watch.close()


def spelt(ranks: Sequence[int]) -> str:
    """Return a label: "rank 1", "ranks 0-3" or "ranks 0,2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    whole = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}-{ranks[-1]}" if whole else f"ranks {','.join(map(str, ranks))}"


def stopped_words(rank: int, pid: int) -> str:
    """Describe a rank stopped by SIGSTOP, with the command that continues it."""
    return f"rank {rank} is stopped (SIGSTOP, or a debugger): kill -CONT {pid}"


def explain(
    trace: Trace, stacks: dict[int, str], seconds: float, now: int, stopped: Mapping[int, int], here: Collection[int]
) -> str:  # fmt: skip
    """Return the message: which rank waits where, which never arrived, and what the others were doing.

    `stacks` are Python stacks of ranks that do not wait, as far as available; `seconds` is the time without progress,
    and `now` the monotonic clock in ns; `stopped` has process ids by rank; `here` are the ranks that the trace is of.
    """
    waits = any(waited_for(number, rank) is not None for number, rank in enumerate(trace.ranks))
    who = "ranks" if len(here) == trace.world_size else "ranks of this node"
    first = f"the {who} wait for each other: none" if waits else "no rank"
    lines = [f"{first} has moved for {seconds:.1f} s."]
    lines += ["  " + line for line in _each_rank(trace, here, stacks, now)]
    held = [f"{stopped_words(rank, pid)} lets it go on" for rank, pid in sorted(stopped.items())]
    culprits = held or sorted(set(reasons(trace, here)))
    if culprits:
        lines += ["Why:", *("  " + line for line in culprits)]
    calls = [waited_for(number, rank) for number, rank in enumerate(trace.ranks)]
    if not held and sum(call is not None and call.is_sharding for call in calls) > 1:
        lines.append(SHARDED)
    if not never(trace):
        lines.append(SLOW)
    return in_cells("\n".join(lines))


SLOW = "(A step that is only slow? Give it time: cluster.run(fn, timeout=60), or train(..., timeout=60).)"


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


def reasons(trace: Trace, here: Collection[int]) -> Iterator[str]:
    """Yield, for each communication waited for, the ranks that have not reached it and where they are."""
    for rank, recorded in enumerate(trace.ranks):
        call = waited_for(rank, recorded)
        if call is None:
            continue
        for other in missing_ranks(call, trace):
            if other not in here:
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

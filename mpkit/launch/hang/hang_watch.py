"""HangWatch: looks at the ranks of a launch again and again, says for whom they wait, and finds when they hang.

look      whether the ranks hang (`Patience`); if not, whether some wait long for others (`WaitWatch`)
notice    says for which ranks others wait and where those are, once for each place
verdict   the error of ranks that hang, with a report of which rank waits where
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from mpkit.common.launch_folder import part
from mpkit.errors import CommMismatch, Deadlock
from mpkit.launch.hang.hang import LIMIT, Patience, explain
from mpkit.launch.hang.progress import FINISHED, RankWatch, Sight
from mpkit.launch.hang.stragglers import IDLE, NOTICE_AFTER, WaitWatch, ranks_spelt, stopped_words
from mpkit.launch.hang.unmatched_calls import first_mismatch
from mpkit.launch.process.rank_processes import RankProcesses
from mpkit.launch.process.stacks import place_of, read_stack, request_stack
from mpkit.trace import Trace

__all__ = ["HangWatch", "LaunchSignals", "ask_stacks"]


SAID_RANKS = 4
"""The number of awaited ranks whose location is reported."""


Ask = Callable[[Sequence[int], Callable[[float], bool]], dict[int, str] | None]
"""Takes ranks and `LaunchSignals.goes_on`; returns their stacks, or None if the launch ends meanwhile."""


class LaunchSignals(Protocol):
    """What a HangWatch asks of a launch."""

    @property
    def trace(self) -> Trace:
        """The trace that the ranks have recorded so far."""

    def goes_on(self, wait: float) -> bool:
        """Handle events, such as exits of ranks, for some seconds, and return whether the launch goes on."""

    def say(self, line: str) -> None:
        """Show a line."""


class HangWatch:
    """Watches the ranks of one launch.

    Args:
        folder: the launch's folder.
        ranks: the number of ranks.
        processes: the ranks' processes.
        patience: decides when to give up.
        local: the ranks that write there, under a launcher on several nodes; None for all.

    Attributes:
        waiting_for: the notice of a long wait, in words; None while there is none.
    """

    def __init__(
        self, folder: Path, ranks: int, processes: RankProcesses, patience: Patience,
        local: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        self._local, self._processes = range(ranks) if local is None else local, processes
        self._ask: Ask = partial(ask_stacks, folder, processes)
        self._patience, self._watch = patience, RankWatch(folder, ranks, local)
        patience.knows_all = len(self._local) == ranks
        self._waiting = WaitWatch(NOTICE_AFTER)
        self._said: set[str] = set()
        self.waiting_for: str | None = None
        self._waited_for: list[int] = []  # the ranks that it is about

    @property
    def has_moved(self) -> bool:
        """Whether some rank had made progress when they were looked at last."""
        return self._patience.still == 0.0

    def look(self, launch: LaunchSignals) -> bool:
        """Look at the ranks again, show a notice of a long wait, and return whether the ranks hang."""
        sights = self._watch.look_at_all()
        trace = launch.trace if self._patience.wants_trace(sights) else None
        still = self._patience.has_seen(sights)
        stopped = self._processes.stopped_pids() if still else {}
        waits = [rank for rank, sight in enumerate(sights) if sight.waiting or sight.state == FINISHED]
        running = self._processes.running_ranks(waits) if still else set()
        if self._patience.is_over(sights, trace, stopped, running):
            return True
        waiting, others = self._waiting.look(sights, self._processes.pids)
        if not others:
            self.waiting_for = None
        elif self.waiting_for is None or others != self._waited_for:
            self._notice(launch, waiting, others, sights)
        return False

    def _notice(
        self, launch: LaunchSignals, waiting: list[int], others: list[int], sights: Sequence[Sight]
    ) -> None:
        stacks = self._ask(others, launch.goes_on)
        if stacks is None:
            return
        stopped, self._waited_for = self._processes.stopped_pids(), others
        places = []
        for rank in others[:SAID_RANKS]:
            share = self._waiting.cpu_share(rank, self._processes.pids)
            busy = "" if share is None else ", using CPU time" if share >= IDLE else ", using no CPU time"
            place = place_of(stacks[rank])
            where = f"at {place}" if place else "in C code" if sights[rank].started else "starting"
            places.append(
                stopped_words(rank, stopped[rank]) if rank in stopped else f"rank {rank} is {where}{busy}"
            )
        more = [f"{len(others) - SAID_RANKS} more"] * (len(others) > SAID_RANKS)
        for_whom = f"for {ranks_spelt(others)}" if waiting != others else "and none uses CPU time"
        have = "has" if len(waiting) == 1 else "have"
        self.waiting_for = (
            f"{ranks_spelt(waiting)} {have} waited for {self._waiting.after:g} s {for_whom}: "
            + "; ".join(places + more)
        )
        if self.waiting_for not in self._said:
            self._said.add(self.waiting_for)
            limit = self._patience.timeout or LIMIT
            idle = "" if self._patience.timeout else " without CPU time"
            launch.say(f"mpkit: {self.waiting_for}. (An error after {limit:g} s{idle}: timeout=...)")

    def verdict(self, launch: LaunchSignals) -> CommMismatch | Deadlock | None:
        """Return the error of ranks that hang; None if the launch ends while they are asked where they are."""
        trace, now, stopped = launch.trace, time.monotonic_ns(), self._processes.stopped_pids()
        still = self._patience.still
        stacks = self._ask(list(self._local), launch.goes_on)
        if stacks is None:
            return None
        return first_mismatch(trace) or Deadlock(explain(trace, stacks, still, now, stopped, self._local))

    def close(self) -> None:
        """Close the files that are watched."""
        self._watch.close()


STACKS_TAKE = 30
"""Looks, `LOOK_EVERY` seconds apart, that ranks are given to write their stacks, from their own thread and then on a
signal. A pause of the whole machine is one look."""

LOOK_EVERY = 0.02


def ask_stacks(
    folder: Path, processes: RankProcesses, ranks: Sequence[int], handle_events: Callable[[float], bool]
) -> dict[int, str] | None:
    """Return the Python stacks of these ranks, "" for a rank that does not answer; None if the launch ends meanwhile.

    Args:
        folder: the launch's folder.
        processes: the ranks' processes.
        ranks: the ranks to ask.
        handle_events: handles events, such as exits of ranks, for some seconds; returns whether the launch goes on.
    """
    paths = {rank: part(folder, rank, "stack") for rank in ranks}
    ends = {rank: path.stat().st_size if path.exists() else 0 for rank, path in paths.items()}
    stacks = dict.fromkeys(ranks, "")
    stopped = processes.stopped_pids()
    for by_signal in (False, True):
        missing = [rank for rank in ranks if not stacks[rank] and rank not in stopped]
        for rank in missing:
            # Without the pipe a rank has no handler yet, and the signal would end it.
            if by_signal and processes.runs(rank) and part(folder, rank, "ask").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(processes.pids[rank], signal.SIGUSR1)
            else:
                request_stack(folder, rank)
        for _ in range(STACKS_TAKE):
            if not missing:
                break
            if not handle_events(LOOK_EVERY):
                return None
            stacks |= {rank: read_stack(folder, rank, ends[rank]) for rank in missing}
            missing = [rank for rank in missing if not stacks[rank]]
    return stacks

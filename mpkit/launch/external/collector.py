"""Rank 0's part of watching over ranks on several machines: what they recorded, who is lost, who hangs, the outcome.

receive    the heartbeats of all ranks, and the packets of those that write elsewhere
look       whether the ranks hang, once every rank has been heard again
judge      the verdict: a rank's error, a lost rank, a hang, or that all have finished
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed import Store  # type: ignore[attr-defined]

from mpkit.common.launch_folder import read_error
from mpkit.errors import MpkitError, RankFailed
from mpkit.launch.external.mirror import FileMirror
from mpkit.launch.external.verdict import Verdict
from mpkit.launch.failure import failure, lost_rank
from mpkit.launch.hang.hang import Patience
from mpkit.launch.hang.hang_watch import HangWatch
from mpkit.launch.process.rank_processes import RankProcesses
from mpkit.trace import Trace

__all__ = ["BEAT", "LOST_AFTER", "LOST_SOON", "Collector"]

BEAT = 0.25
"""Seconds between two heartbeats."""

STORE_TAKES = 0.02
"""CPU seconds between two looks at a rank that waits, for the threads that serve or ask the store."""

LOST_AFTER = 30.0
"""Seconds without a heartbeat after which a rank is considered dead. A thread sends them, so that a rank may compute as
long as it likes; only C code that keeps Python's lock for so long would be mistaken."""

PART = 100_000
"""Losses per value of the store, which takes some megabytes each."""

LOST_SOON = 3.0
"""The same once another rank has found a connection closed, or the launcher has begun to end processes."""


class RemoteProcesses(RankProcesses):
    """The processes of ranks that a launcher has started: what is known of them is what their heartbeats say.

    Attributes:
        cpu: the CPU seconds that each rank's process has used, and its main thread alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cpu: dict[int, tuple[float, float]] = {}

    def running_ranks(self, waiting: Collection[int] = ()) -> set[int]:
        """Return the ranks that used CPU time since the last call, more than a store that one of them serves."""
        found = set()
        for rank, used in self.cpu.items():
            for main in (False, True):
                new, before = used[main], self._cpu.get((rank, main), used[main])
                if main == (rank in waiting) and new - before > STORE_TAKES:
                    found.add(rank)
                self._cpu[rank, main] = new
        return found


class Collector:
    """What rank 0 does at each heartbeat.

    Args:
        store: the launch's part of the store.
        folder: the folder in which all traces come together.
        names: the ranks in words, such as "rank 3 on node-b".
        offsets: ns to add to the times of the ranks that write elsewhere, by rank.
        timeout, grace: see `mpkit.launch.hang.hang.Patience`.
        say: shows a line.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        names: Sequence[str],
        offsets: Mapping[int, int],
        timeout: float | None,
        grace: float,
        say: Callable[[str], None],
    ) -> None:
        self._store, self._folder, self._names, self.say = store, folder, names, say
        self._ranks = len(names)
        self._mirrors = {rank: FileMirror(folder, rank, offset) for rank, offset in offsets.items()}
        self._taken = dict.fromkeys(self._mirrors, 0)
        self._beats: list[dict[str, Any]] = [{"n": 0, "state": "running"} for _ in names]
        self._heard = [time.monotonic()] * self._ranks
        self._fresh: set[int] = set()
        self._ticked = time.monotonic()
        self._trouble: float | None = None  # since when some rank fails for a reason not known yet
        self._limit = LOST_AFTER if timeout is None else min(LOST_AFTER, timeout)
        self._asked = 0
        self._processes = RemoteProcesses()
        patience = Patience(timeout, grace, look_every=BEAT)
        self._hangs = HangWatch(folder, self._ranks, self._processes, patience, self._ask)
        self.drifts: dict[int, tuple[int, int, int]] = {}
        self.other_work: Callable[[], None] = lambda: None  # rank 0's own heartbeat, beside waits for answers

    @property
    def trace(self) -> Trace:
        """The trace of all ranks as far as it has arrived."""
        return Trace.read(self._folder)

    @property
    def waiting_for(self) -> str | None:
        """The notice of a long wait; None while there is none."""
        return self._hangs.waiting_for

    # ---- receive --------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take the heartbeats and packets that have come, and let the others know that rank 0 lives.

        Raises:
            MpkitError: the folder is gone.
        """
        if not self._folder.is_dir():
            raise MpkitError(
                f"{self._folder}, the folder of this run, was removed while it ran: something cleans up temporary "
                "files there. The environment variable TMPDIR names another place: TMPDIR=$HOME/tmp"
            )
        now = time.monotonic()
        asleep = max(0.0, now - self._ticked - 1.0)  # of this process itself, in a frozen container say
        self._ticked = now
        beats = self._store.multi_get([f"beat{rank}" for rank in range(self._ranks)])
        for rank, text in enumerate(beats):
            beat = json.loads(text)
            moved = beat["n"] > self._beats[rank]["n"]
            self._heard[rank] = now if moved else self._heard[rank] + asleep
            if not moved:
                continue
            if rank in self._mirrors:
                self._take(rank, beat["packets"])
            self._fresh.add(rank)
            self._processes.cpu[rank] = tuple(beat["cpu"])
            self._beats[rank] = beat

    def _take(self, rank: int, until: int) -> None:
        while self._taken[rank] < until:
            key = f"packet{rank}.{self._taken[rank]}"
            self._mirrors[rank].take(bytes(self._store.get(key)))
            self._store.delete_key(key)
            self._taken[rank] += 1

    def goes_on(self, wait: float) -> bool:
        """Receive what comes within some seconds; the launch goes on.

        Polled: heartbeats are values that change, and a store can wait only for a key that is not there yet.
        """
        time.sleep(max(wait, 0.05))
        self.other_work()
        self.receive()
        return True

    def _ask(self, ranks: Sequence[int], handle: Callable[[float], bool]) -> dict[int, str] | None:
        """Ask ranks for their Python stacks, "" for one that does not answer; None if the launch ends meanwhile."""
        self._asked += 1
        stacks = dict.fromkeys(ranks, "")
        until = time.monotonic() + 2.0 + 2 * BEAT
        while not all(stacks.values()) and time.monotonic() < until:
            if not handle(0.1):
                return None
            answers = {rank: self._beats[rank].get("stack") or [0, ""] for rank in ranks}
            stacks |= {rank: text for rank, (asked, text) in answers.items() if asked == self._asked}
        return stacks

    # ---- look, judge ----------------------------------------------------------------------------------------

    def judge(self) -> Verdict | None:
        """Return the verdict if the launch is over; None if it goes on."""
        states = [beat["state"] for beat in self._beats]
        if all(state == "finished" for state in states):
            for rank, (drift, since, until) in self.drifts.items():
                self._mirrors[rank].correct(drift, since, until)
            return Verdict(None, self.trace.losses)
        error = self._find_failure(states) or self._find_hang()
        return None if error is None else Verdict(error, self.trace.losses)

    def _find_failure(self, states: Sequence[str]) -> Exception | None:
        """Return the error of a rank that failed, was ended, or has not been heard of."""
        now = time.monotonic()
        failed = [rank for rank, state in enumerate(states) if state == "failed"]
        ended = [rank for rank, beat in enumerate(self._beats) if beat.get("terminated")]
        errors = [read_error(self._folder, rank) for rank in failed]
        statuses = dict.fromkeys(failed, 1)
        if any(error is not None and not error["secondary"] for error in errors):
            return failure(self._folder, statuses, self.trace)
        if (failed or ended) and self._trouble is None:
            self._trouble = now
        limit = self._limit if self._trouble is None else min(self._limit, LOST_SOON)
        silent = {
            rank: now - heard
            for rank, heard in enumerate(self._heard)
            if now - heard > limit - 1.0 and states[rank] != "failed"
        }
        if any(seconds > limit for seconds in silent.values()):
            first = max(silent, key=lambda rank: silent[rank])
            return lost_rank(first, self.trace, self._names[first], silent[first], len(silent) - 1)
        if self._trouble is None or now - self._trouble < LOST_SOON + 1.0:
            return None
        if failed:
            return failure(self._folder, statuses, self.trace)
        return RankFailed(
            f"the launcher ended {self._names[ended[0]]} (SIGTERM), and no rank has failed: its time was over, or "
            "somebody ended the job",
            rank=ended[0],
            signal="SIGTERM",
        )

    def _find_hang(self) -> Exception | None:
        if len(self._fresh) < self._ranks or self._trouble is not None:
            return None
        self._fresh.clear()
        return self._hangs.verdict(self) if self._hangs.look(self) else None

    # ---- tell -----------------------------------------------------------------------------------------------

    def tell(self, number: int, verdict: Verdict | None) -> None:
        """Write what the other processes read at each of their heartbeats."""
        told = {"n": number, "ask": self._asked, "verdict": None if verdict is None else verdict.to_json()}
        if verdict is not None:
            losses = np.array(verdict.losses, float)
            parts = np.array_split(losses, 1 + len(losses) // PART)
            for i, some in enumerate(parts):
                self._store.set(f"losses{i}", some.tobytes())  # type: ignore[arg-type]
            told["losses"] = len(parts)
        self._store.set("control", json.dumps(told))

    @property
    def request_number(self) -> int:
        """The number of the latest request for stacks."""
        return self._asked

    def close(self) -> None:
        """Close the copies' files."""
        self._hangs.close()
        for mirror in self._mirrors.values():
            mirror.close()

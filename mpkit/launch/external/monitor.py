"""The thread of a process that a launcher started: heartbeats and packets out, and in comes the verdict.

beat       what this rank has recorded since the last time (`packets`), and that it lives
control    from rank 0: whether it lives, whether it wants a stack, and how the launch ended. On rank 0: `Collector`
conclude   give the process's own code a moment to come out; if it is stuck in a collective, end the process

Everything goes through the store, which training uses only while groups are formed: the network of the collectives is
not shared with any group of ours. A second thread notices if the store itself no longer answers.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.distributed import Store  # type: ignore[attr-defined]

from mpkit.errors import MpkitError, RankFailed
from mpkit.launch.external.collector import BEAT, LOST_AFTER, LOST_SOON, Collector
from mpkit.launch.external.packets import Sender
from mpkit.launch.external.run_folders import Folders
from mpkit.launch.external.verdict import Verdict
from mpkit.launch.failure import last_seen
from mpkit.launch.process.stacks import stack_of
from mpkit.launch.process.vitals import vitals_of
from mpkit.trace.files import read_rank

__all__ = ["Monitor"]

WAY_OUT = 2.0
"""Seconds that this process's own code is given to come out with an error of its own, before the process is ended."""


class Monitor:
    """Watches over this process's rank, for all ranks.

    Args:
        store: the launch's part of the store, with a connection that no other thread uses.
        rank: this process's rank.
        names: the ranks in words.
        folders: where this rank writes its trace, and whether rank 0 reads another folder and so wants packets.
        collector: rank 0's part; None on the other ranks.
        timeout: see `Cluster.run`.
        cleanup: called before the process is ended.

    Attributes:
        verdict: how the launch ended; None before.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: list[str],
        folders: Folders,
        collector: Collector | None,
        timeout: float | None = None,
        cleanup: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self._rank, self._names, self._folders = store, rank, names, folders
        self._sender = Sender(folders.folder, rank) if rank in folders.remote else None
        self._collector, self._cleanup = collector, cleanup
        self._limit = LOST_AFTER if timeout is None else min(LOST_AFTER, timeout)
        self._main = threading.get_ident()
        self.verdict: Verdict | None = None
        self._decided, self._out = threading.Event(), threading.Event()
        self._state, self._number, self._packets = "running", 0, 0
        self._stack: list[Any] = [0, ""]
        self._terminated: float | None = None
        self._failed: float | None = None
        self._control: dict[str, Any] = {"n": 0, "ask": 0, "verdict": None}
        self._heard = self._alive = time.monotonic()
        self._woken, self.wake = os.pipe()
        os.set_blocking(self.wake, False)

    def announce(self) -> None:
        """Write the first heartbeat, so that rank 0 finds one of every rank. All do so before any thread starts."""
        self._beat()
        if self._collector is not None:
            self._collector.tell(0, None)

    def start(self) -> None:
        """Start the threads."""
        if self._collector is not None:
            self._collector.other_work = self._beat
        self._heard = self._alive = time.monotonic()
        threading.Thread(target=self._run, name="mpkit-monitor", daemon=True).start()
        threading.Thread(target=self._watch_store, name="mpkit-store", daemon=True).start()

    def come_out(self, state: str) -> Verdict:
        """Say that this process's own code is done, "finished" or "failed", and wait for the verdict."""
        self._say_out(state)
        while not self._decided.wait(
            0.2
        ):  # in parts, since a wait without a limit would not see Ctrl-C everywhere
            pass
        assert self.verdict is not None
        return self.verdict

    def give_up(self, seconds: float) -> Verdict | None:
        """Say that this process's own code has failed, and wait so long for the verdict; None if there is none."""
        self._say_out("failed")
        self._decided.wait(seconds)
        return self.verdict

    def _say_out(self, state: str) -> None:
        self._state = state
        self._out.set()
        os.write(self.wake, b"\0")

    def fail(self) -> None:
        """Let all ranks end with the error that has been written into this rank's file; any thread may call this."""
        self._state = "failed"
        os.write(self.wake, b"\0")

    @property
    def is_terminated(self) -> bool:
        """Whether the launcher has asked this process to end."""
        return self._terminated is not None

    # ---- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self.verdict is None:
                self._beat()
                verdict = self._judge()
                self._alive = time.monotonic()
                if verdict is not None:
                    self._conclude(verdict)
                else:
                    self._pause()
        except MpkitError as error:  # something was not signed by this launch, or rank 0's folder is gone
            if self._collector is not None:
                self._collector.tell(self._number + 1, Verdict(error))
            self._conclude(Verdict(error))
        except Exception as error:  # whatever it is, the other ranks must not wait for this one forever
            silent = time.monotonic() - self._heard
            first = self._collector is None and silent > LOST_SOON / 2  # rank 0 was gone before the store was
            self._conclude(Verdict(self._lost_rank_0(silent) if first else self._store_gone(error)))

    def _pause(self) -> None:
        ready, _, _ = select.select([self._woken], [], [], BEAT)
        if ready and any(byte for byte in os.read(self._woken, 64)) and self._terminated is None:
            self._terminated = time.monotonic()

    def _beat(self) -> None:
        state = self._state  # before the packets: what it says is complete when they have been sent
        while self._sender is not None and (packet := self._sender.packet()) is not None:
            self._store.set(f"packet{self._rank}.{self._packets}", packet)  # type: ignore[arg-type]
            self._packets += 1
            if state == "running":  # one packet per heartbeat, so that training has the network
                break
        self._number += 1
        beat = {"n": self._number, "packets": self._packets, "state": state, "stack": self._stack}
        main = vitals_of(os.getpid(), main_thread=True)
        used = time.process_time() - time.thread_time()  # without this thread's
        beat["cpu"] = used, used if main is None else main.cpu
        self._store.set(f"beat{self._rank}", json.dumps(beat | {"terminated": self.is_terminated}))

    def _judge(self) -> Verdict | None:
        if self._collector is not None:
            self._collector.receive()
            verdict = self._collector.judge()
            self._collector.tell(self._number, verdict)
            self._answer(self._collector.request_number)
            return verdict
        control = json.loads(self._store.get("control"))
        now = time.monotonic()
        if control["n"] <= self._control["n"]:
            control = self._control  # an older one is no sign of life
        else:
            self._heard, self._control = now, control
        self._answer(control["ask"])
        if control["verdict"] is not None:
            parts = [bytes(self._store.get(f"losses{i}")) for i in range(control["losses"])]
            return Verdict.from_json(control["verdict"], np.frombuffer(b"".join(parts), float).tolist())
        hint = self.is_terminated or self._state == "failed"
        if now - self._heard > (min(self._limit, LOST_SOON) if hint else self._limit):
            return Verdict(self._lost_rank_0(now - self._heard))
        return None

    def _answer(self, asked: int) -> None:
        """Take this process's stack if rank 0 has asked for it; the next heartbeat carries it."""
        if asked != self._stack[0]:
            self._stack = [asked, stack_of(self._main)]

    def _watch_store(self) -> None:
        """Conclude if the store's host no longer answers: a dead host closes no connection."""
        while not self._decided.wait(1.0):
            silent = time.monotonic() - self._alive
            if silent > self._limit + LOST_SOON:
                self._conclude(Verdict(self._store_gone(None)))

    # ---- conclude -------------------------------------------------------------------------------------------

    def _conclude(self, verdict: Verdict) -> None:
        """Let the process's own code come out with the verdict, or end the process."""
        if self.verdict is not None:
            return
        self.verdict = verdict
        self._decided.set()
        if verdict.error is None or self._out.wait(WAY_OUT):
            return
        message = f"mpkit: {self._names[self._rank]} is ended: {verdict.error}\n"
        try:
            sys.stdout.flush()
            os.write(2, message.encode("utf-8", "replace"))
            self._cleanup()
        finally:
            os._exit(1)

    def _lost_rank_0(self, seconds: float) -> RankFailed:
        return RankFailed(
            f"{self._names[0]} has not been heard of for {seconds:.1f} s: its process was killed or stopped, or its "
            f"host or the network to it has died. {self._describe_last()}",
            rank=0,
        )

    def _store_gone(self, error: BaseException | None) -> RankFailed:
        why = "" if error is None else f" ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
        return RankFailed(
            f"the store that the ranks meet in no longer answers{why}: the host that serves it, usually that of rank 0 "
            f"({self._names[0]}), has died, or the network to it, or the launcher there has ended. "
            f"{self._describe_last()}",
            rank=0,
        )

    def _describe_last(self) -> str:
        """Say what this rank did last, and where the traces are, which rank 0 can no longer be asked for."""
        _, last = last_seen(read_rank(self._folders.folder, self._rank))
        return f"{self._names[self._rank]} was here: {last[0].lower()}{last[1:]}. {self._keep_traces()}"

    def _keep_traces(self) -> str:
        """Keep this node's folder, and say how its trace and rank 0's can be read."""
        self._folders.keep()
        gathered = (
            f"What came together of all ranks is on rank 0's host: mk.Trace.load({self._folders.first!r})"
        )
        if self._sender is None:  # rank 0 and this rank write into the same folder
            return f"{gathered}."
        own = f"mk.Trace.load({str(self._folders.folder)!r})"
        return f"{gathered}; what the ranks of this node recorded is here: {own}."

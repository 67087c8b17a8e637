"""One launch on ranks that a launcher has started: the same to `Cluster` and `Run` as `mpkit.launch.launch.Launch`.

agree     folders, clocks, heartbeats: every process waits for the others
work      this process's own rank, in its main thread, while the monitor watches over all
verdict   the same on every process: results, or the error that every process raises
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import torch.distributed as dist

from mpkit.common.disk import write_whole
from mpkit.common.launch_folder import APART, LAUNCHED, TOGETHER, Settings, read_error, write_error
from mpkit.devices.local.nvml import NOT_SAMPLED
from mpkit.errors import MpkitError, TraceError
from mpkit.launch.external.collector import LOST_SOON, Collector
from mpkit.launch.external.monitor import Monitor
from mpkit.launch.external.own_rank import Results, ended_by_launcher, note_termination, run_rank
from mpkit.launch.external.run_folders import Folders, clocks_in_words, measure, open_folders
from mpkit.launch.external.session import Session
from mpkit.launch.external.verdict import Verdict
from mpkit.launch.hang.hang import GRACE
from mpkit.launch.process.rank import report
from mpkit.trace import Trace

__all__ = ["ExternalLaunch"]


class ExternalLaunch:
    """Ranks that run one function, of which this process is one.

    Args:
        session: the processes.
        settings: what forked ranks would read.
        payload: the bytes that `pack` returned.
        timeout, grace: see `mpkit.launch.hang.hang.Patience`.
        sink: receives lines of mpkit's own, on rank 0; what ranks print, they print themselves.
        meta: data for the trace's meta.

    Attributes:
        folder: where this rank writes; on rank 0, where all traces come together.
        leads: whether this is rank 0, which has the trace of all ranks.
        apart: whether some ranks write into another folder than rank 0.
    """

    def __init__(
        self,
        session: Session,
        settings: Settings,
        payload: bytes,
        *,
        timeout: float | None,
        sink: Callable[[str], None],
        meta: dict[str, Any],
        grace: float = GRACE,
    ) -> None:
        session.check()
        self._session, self._payload = session, payload
        self.ranks, self.leads, self.pids = session.ranks, session.rank == 0, [os.getpid()]
        self._over, self.stopped = threading.Event(), False
        self.error: Exception | None = None
        self._trace: Trace | None = None
        # ---- agree
        self._store = session.part("launch")
        self._folders = open_folders(session, self._store)
        self.folder = self._folders.folder
        self.apart = bool(self._folders.remote)
        (self.folder / LAUNCHED).write_text(APART if self.apart else TOGETHER)
        self._results = Results(session.seal)
        self._remove = weakref.finalize(self, _free, self._folders, self._results)
        self._settings = dataclasses.replace(
            settings, ranks=session.ranks, backend=session.backend,
            compares=settings.compares and not self._folders.remote,  # through memory, which one machine has
        )  # fmt: skip
        self._clocked = time.monotonic_ns()
        facts = {"world_size": self.ranks, "device": settings.device, "backend": session.backend}
        facts |= {"hosts": session.hosts, "nodes": session.nodes, "launcher": session.place.launcher}
        if settings.device == "cuda":
            facts["gpus_not_sampled"] = (
                f"{NOT_SAMPLED}: that is done where mk.Cluster starts the ranks itself, and here a launcher did; "
                "`nvidia-smi dmon -s umt` on a node shows its GPUs meanwhile."
            )
        self.meta = {**facts, **meta}
        self._write_meta({})
        collector = None
        if self.leads:
            offsets = {rank: offset.ns for rank, offset in self._folders.offsets.items()}
            collector = Collector(
                self._store.clone(), self.folder, session.names, offsets, timeout, grace, sink
            )
        self._collector = collector
        self._monitor = Monitor(
            self._store.clone(), session.rank, session.names, self._folders, collector, timeout, self._remove
        )  # fmt: skip
        self._monitor.announce()

    # ---- work -----------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Run this process's rank, and wait for the end of all. `error` has the outcome; nothing is raised."""
        session = self._session
        self._store.set(f"ready{session.rank}", "")
        session.wait(self._store, "ready")
        self._monitor.start()
        state, raised = "failed", None
        with note_termination(self._monitor.wake):
            try:
                run_rank(
                    session.place, self._settings, self.folder, self._store, self._payload, self._results
                )
                self._measure_drift()
                state = "finished"
            except KeyboardInterrupt:
                self._on_interrupt()
                raise
            except (Exception, SystemExit) as error:
                raised = error  # comes back with the verdict
                if read_error(self.folder, session.rank) is None:  # not raised by the rank's own code
                    try:
                        report(error, session.rank, self.folder, None)
                    except OSError:  # the disk is full, or rank 0 has ended and removed the folder
                        traceback.print_exception(error)
            verdict = self._monitor.come_out(state)
            self.error = verdict.error
            if raised is not None and self.error is None:
                raise raised
            self._losses = verdict.losses
            self._finish()
        if self._monitor.is_terminated and self.error is None:
            self._remove()
            ended_by_launcher()

    def _on_interrupt(self) -> None:
        """Let the other ranks end with this process's KeyboardInterrupt, unless they have one of their own."""
        self._let_read(self._monitor.give_up(2 * LOST_SOON))
        self._session.broken = self.stopped = True
        self._over.set()

    def _measure_drift(self) -> None:
        """Measure the clocks again, and let rank 0 correct times for the difference."""
        later = measure(self._session, self._store, self._folders.leaders, "end")
        if self._collector is None:
            return
        now, drifts = time.monotonic_ns(), {}
        for rank, offset in self._folders.offsets.items():
            again = later.get(self._session.nodes.index(self._session.nodes[rank]), offset)
            if abs(again.ns - offset.ns) > again.residual + offset.residual:
                drifts[rank] = again.ns - offset.ns
        self._collector.drifts = {rank: (drift, self._clocked, now) for rank, drift in drifts.items()}
        self._write_meta(drifts)

    def _write_meta(self, drifts: dict[int, int]) -> None:
        if self._folders.offsets:
            self.meta["clocks"] = clocks_in_words(self._session, self._folders.offsets, drifts)
        if self._folders.made:
            write_whole(self.folder / "meta.json", json.dumps(self.meta).encode())

    def _finish(self) -> None:
        """End the launch in this process, once the others know the verdict too."""
        self._session.broken = self.error is not None
        self._let_read(self._monitor.verdict)
        if self._collector is not None:
            try:
                self._trace = self._collector.trace
            except TraceError:
                if self.error is None:  # which would be that the folder is gone
                    raise
            self._collector.close()
        self._over.set()

    def _let_read(self, verdict: Verdict | None) -> None:
        """Let every process have read the verdict before rank 0, whose process may serve the store, goes on.

        Polled: the store's own wait leaves Ctrl-C unanswered, and prints a warning of C++ code when its time is over.
        """
        finished = verdict is not None and verdict.error is None
        until = time.monotonic() + (5.0 if finished else 1.0)  # a dead rank reads nothing
        gone = [f"gone{rank}" for rank in range(self.ranks)]
        with suppress(dist.DistError, RuntimeError):  # the store may be gone, with rank 0's process
            self._store.set(gone[self._session.rank], "")
            while self.leads and not self._store.check(gone) and time.monotonic() < until:
                time.sleep(0.02)

    # ---- what Cluster and Run ask of a launch ---------------------------------------------------------------

    def finish(self, pause: float = 0.1, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until the launch is over, in another thread than the one that works."""
        tick()
        while not self._over.wait(pause):
            tick()

    @property
    def has_ended(self) -> bool:
        """Whether the launch has ended in this process."""
        return self._over.is_set()

    @property
    def waiting_for(self) -> str | None:
        """The notice of a long wait, on rank 0; None while there is none."""
        return None if self._collector is None else self._collector.waiting_for

    @property
    def trace(self) -> Trace:
        """The trace of all ranks as far as it has arrived.

        Raises:
            MpkitError: this is not rank 0.
        """
        if self._collector is None:
            raise MpkitError(
                f"the traces of all ranks come together on rank 0, and this is rank {self._session.rank}: "
                "`if cluster.rank == 0:` before what reads or draws them, such as run.timeline(). run.losses, "
                "run.state_dict() and the results of cluster.run are the same on every rank."
            )
        return self._collector.trace if self._trace is None else self._trace

    @property
    def losses(self) -> list[float]:
        """The loss of every step so far; on other ranks than 0, once the run is over."""
        if self.has_ended:
            return self._losses
        return self.trace.losses if self.leads else []

    def kill(self) -> None:
        """End all ranks."""
        self.stopped = True
        error = self.error or MpkitError(f"this run was stopped on {self._session.names[self._session.rank]}")
        details = {
            "time": time.monotonic_ns(), "type": type(error).__name__, "message": str(error), "traceback": "",
            "folded": "", "secondary": False, "other": None,
        }  # fmt: skip
        with suppress(FileNotFoundError):  # rank 0 has ended and removed the folder
            write_error(self.folder, self._session.rank, details)
        self._monitor.fail()

    def end(self, error: BaseException | None = None) -> None:
        """End all ranks with an error, or because the user wants it."""
        if isinstance(error, Exception) and self.error is None:
            self.error = error
        if not self.has_ended:
            self.kill()

    def raise_error(self) -> None:
        """Raise the error of the launch, if there is one."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def results(self, load: Callable[[IO[bytes]], Any] | None = None) -> list[Any]:
        """Return what the function returned, by rank, or raise the error of the launch."""
        self.raise_error()
        return [self.result(rank, load) for rank in range(self.ranks)]

    def result(self, rank: int, load: Callable[[IO[bytes]], Any] | None = None) -> Any:
        """Return what the function returned on one rank."""
        return self._results.read(rank, load)


def _free(folders: Folders, results: Results) -> None:
    folders.remove()
    results.close()

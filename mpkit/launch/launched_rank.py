"""One launch on ranks that a launcher has started.

agree     one folder per node, the nodes' clocks, the process ids of the node's ranks
work      this process's own rank, in its main thread; the first rank of each node watches its ranks for hangs
share     every process has all results and losses; rank 0 has the traces of all nodes, on its own clock
fail      this process ends with the error of the rank that failed first on this node; the launcher ends the others
"""

import io
import json
import os
import shutil
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from mpkit.common.disk import write_whole
from mpkit.common.launch_folder import APART, LAUNCHED, TOGETHER, Settings, part, read_error, reserve
from mpkit.common.torch_private import _world
from mpkit.errors import MpkitError, TraceError
from mpkit.launch.failure import failure
from mpkit.launch.gpu_sampler import NOT_SAMPLED
from mpkit.launch.hang.hang import LOOK_EVERY, HangWatch
from mpkit.launch.launch import RankLaunch
from mpkit.launch.process.processes import answer_requests, end_answers
from mpkit.launch.process.rank import device_of, join, report, work
from mpkit.launch.process.run_folder import empty_folder, hold, keep
from mpkit.launch.torchrun import Launcher
from mpkit.strategies.comm.own_process import forget_group
from mpkit.strategies.comm.release import free_kept
from mpkit.trace import HEADER, MEMORY, OP, Trace
from mpkit.trace.record.recorder import Recorder
from mpkit.trace.records import VALUE

WAY_OUT = 2.0  # seconds that the program has to come out with an error of its own, before the process ends
GROUP_TIMEOUT = timedelta(minutes=30)  # torch's limit: no rank waits longer for a host that died silently
TIMES = {"ops": (OP, ("start", "end")), "mem": (MEMORY, ("time",)), "log": (VALUE, ("time",))}
"""The files of records with times, and the columns that have them."""


class LaunchedRank(RankLaunch):
    """A launch of ranks that a launcher has started, of which this process is one.

    `sink` receives mpkit's own lines on rank 0; ranks print their output themselves. `folder` is where the ranks of
    this node write; on rank 0, all traces come together there.
    """

    def __init__(
        self, launcher: Launcher, settings: Settings, payload: bytes, *, timeout: float | None,
        sink: Callable[[str], None], meta: dict[str, Any],
    ) -> None:  # fmt: skip
        if launcher.broken:
            raise MpkitError(
                "an earlier run of these processes has failed, and some of them may be gone: let the error end the "
                "script, and the launcher starts all ranks again (torchrun --max-restarts 3 does so by itself)"
            )
        facts: dict[str, Any] = {
            "world_size": launcher.ranks, "device": settings.device, "backend": launcher.backend,
            "hosts": launcher.hosts, "nodes": launcher.nodes, "launcher": launcher.place.launcher,
        }  # fmt: skip
        if settings.device == "cuda":
            facts["gpus_not_sampled"] = (
                f"{NOT_SAMPLED}: that is done where mk.Cluster starts the ranks itself, and here a launcher did; "
                "`nvidia-smi dmon -s umt` on a node shows its GPUs meanwhile."
            )
        super().__init__(launcher.ranks, {**facts, **meta})
        self._launcher, self._payload, self._sink = launcher, payload, sink
        self.leads = launcher.rank == 0
        self.apart = len(set(launcher.nodes)) > 1  # on several nodes, which write into several folders
        self._over = threading.Event()
        self._losses: list[float] = []
        self._results: list[bytes] = []
        self._settings = replace(
            settings, ranks=launcher.ranks, backend=launcher.backend,
            compares=settings.compares and not self.apart,  # through memory, which one machine has
        )  # fmt: skip
        self._watches = launcher.rank == launcher.first
        self.folder = _folder_of_node(launcher)
        if self._watches:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
            (self.folder / LAUNCHED).write_text(APART if self.apart else TOGETHER)
            self._write_meta()
        else:
            weakref.finalize(self, os.close, hold(self.folder))
        self._clocks = [(time.monotonic_ns(), *launcher.clock_offset())]
        self._processes.pids = launcher.tell(os.getpid())
        self.hangs = HangWatch(self.folder, self.ranks, self._processes, timeout, launcher.local)

    @property
    def pids(self) -> list[int]:
        """This process's id alone."""
        return [os.getpid()]

    def _write_meta(self) -> None:
        write_whole(self.folder / "meta.json", json.dumps(self.meta).encode())

    def work(self) -> None:
        """Run this process's rank, and wait for the end of all. `error` has the outcome; nothing is raised."""
        if self._watches:
            threading.Thread(target=self._watch, name="mpkit-watch", daemon=True).start()
        try:
            self._run_rank()
        except KeyboardInterrupt:
            self._launcher.broken = self.stopped = True
            raise
        except (Exception, SystemExit) as error:
            self._fail(error)
        finally:
            self._set_over()

    def _set_over(self) -> None:
        self.has_ended = True
        self._over.set()

    def _run_rank(self) -> None:
        launcher, settings, recorder = self._launcher, self._settings, None
        stack = answer_requests(self.folder, launcher.rank)
        state, threads = torch.get_rng_state(), torch.get_num_threads()  # which a rank changes in its process
        try:
            try:
                device = device_of(launcher.place.local_rank, settings)
                recorder = Recorder(self.folder, launcher.rank, device, layers=settings.layers)
                with self._group():
                    payload = io.BytesIO(self._payload)
                    result = work(launcher.rank, settings, device, recorder, payload, enter=False)
                    recorder.close("finished")
                    self._share(result)
            finally:  # before others hear of an error: the launcher may then kill this process
                torch.set_rng_state(state)
                torch.set_num_threads(threads)
                with suppress(OSError, ValueError):
                    sys.stdout.flush()
        except BaseException as error:
            try:
                report(error, launcher.rank, self.folder, recorder)
            except OSError:  # the disk is full, or the folder is gone
                traceback.print_exception(error)
            raise
        finally:
            end_answers(self.folder, launcher.rank, stack)

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Form the process group, unless the program has; afterwards free it and the groups within it."""
        own, hook = not dist.is_initialized(), sys.excepthook  # which each init_process_group wraps once more
        if own:
            self._form("group")
        before, launcher = set(_world.pg_map), self._launcher
        joined = join(launcher.rank, self.ranks, launcher.backend, launcher.store_for("program"))
        try:
            yield
        finally:
            joined.restore()
            if dist.is_initialized():
                forget_group()
        free_kept()
        if own:
            dist.destroy_process_group()  # and all groups within it
            sys.excepthook = hook
        for group in [each for each in _world.pg_map if each not in before]:
            dist.destroy_process_group(group)

    def _form(self, name: str) -> None:
        dist.init_process_group(
            self._launcher.backend, store=self._launcher.store_for(name), rank=self._launcher.rank,
            world_size=self.ranks, timeout=GROUP_TIMEOUT,
        )  # fmt: skip

    def _share(self, result: bytes) -> None:
        """Give every process all results and losses, and rank 0 the traces of all nodes."""
        if not dist.is_initialized():  # a program frees its groups at its end
            self._form("share")
        self._results = [b""] * self.ranks
        dist.all_gather_object(self._results, result)
        if self.apart:
            self._gather_traces()
        if self.leads:
            self._trace = Trace.read(self.folder)
        losses: list[Any] = [self._trace.losses if self._trace is not None else None]
        dist.broadcast_object_list(losses, 0)
        self._losses = losses[0] or []

    def _gather_traces(self) -> None:
        """Bring the files of all nodes to rank 0, on its clock: two measurements, and a straight line between them."""
        launcher = self._launcher
        self._clocks.append((time.monotonic_ns(), *launcher.clock_offset()))
        files = {} if launcher.nodes[launcher.rank] == launcher.nodes[0] else self._files_on_rank_0s_clock()
        gathered: list[Any] | None = [None] * self.ranks if self.leads else None
        clocks: list[Any] = [None] * self.ranks
        dist.all_gather_object(clocks, self._clocks)
        dist.gather_object(files, gathered)
        for rank, each in enumerate(gathered or []):
            for name, content in each.items():
                part(self.folder, rank, name).write_bytes(content)
        self.meta["clocks"] = [
            {
                "node": launcher.nodes[rank], "host": launcher.hosts[rank], "offset": clocks[rank][0][1] / 1e9,
                "residual": clocks[rank][0][2] / 1e9, "drift": _drift(clocks[rank]) / 1e9,
            }
            for rank in launcher.firsts
        ]  # fmt: skip
        if self.leads:
            self._write_meta()

    def _files_on_rank_0s_clock(self) -> dict[str, bytes]:
        (began, offset, _), (ended, _, _) = self._clocks
        slope = _drift(self._clocks) / max(1, ended - began)
        names = (*TIMES, "names", "sent", "taken", "axes")
        paths = {name: part(self.folder, self._launcher.rank, name) for name in names}
        files = {name: path.read_bytes() for name, path in paths.items() if path.exists()}
        for name, (dtype, columns) in TIMES.items():
            if not files.get(name):
                continue
            head = np.frombuffer(files[name], HEADER, 1).copy()
            rows = np.frombuffer(files[name], dtype, int(head["count"][0]), HEADER.itemsize).copy()
            for column in columns:
                known = rows[column] > 0
                rows[column][known] += (offset + slope * (rows[column][known] - began)).astype(np.int64)
            head["check"] = 0  # of the records as they were
            files[name] = head.tobytes() + rows.tobytes()
        return {name: content for name, content in files.items() if content}

    def _watch(self) -> None:
        """Look at the ranks of this node until the launch is over; ranks that hang end with the reason."""
        while not self._over.wait(LOOK_EVERY):
            if self.hangs.look(self) and (error := self.hangs.verdict(self)) is not None:
                records = keep(self.folder)
                self._end_process(error, f"\nThese ranks' records are here: mk.Trace.load({str(records)!r})")

    def poll(self, wait: float) -> bool:
        """Return whether the launch is over, after `wait` seconds at most."""
        return self._over.wait(wait)

    def say(self, line: str) -> None:
        """Show a line: rank 0 where the run shows its own, other nodes on standard error."""
        if self.leads:
            self._sink(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def _fail(self, error: BaseException) -> None:
        """Find what made this rank fail: its own error, or that of a rank of this node whose end it has noticed."""
        self._launcher.broken = True
        self._set_over()
        deadline = time.monotonic() + WAY_OUT
        while time.monotonic() < deadline and self.error is None:
            errors = [read_error(self.folder, rank) for rank in self._launcher.local]
            if any(each is not None and not each["secondary"] for each in errors):
                break
            time.sleep(0.05)  # the other rank may be writing its error
        if self.error is None:
            try:
                statuses = dict.fromkeys(self._launcher.local, 1)
                self.error = failure(self.folder, statuses, Trace.read(self.folder))
            except (OSError, TraceError):  # the folder is gone
                self.error = error if isinstance(error, Exception) else MpkitError(str(error))
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)  # torchrun's summary names rank, host and line

    def _end_process(self, error: Exception, after: str = "") -> None:
        """End this process with an error, after it had a moment to come out with it; the launcher ends the others."""
        if self.error is None:
            self.error = error
        if self._over.wait(WAY_OUT):
            return
        name = self._launcher.names[self._launcher.rank]
        os.write(2, f"mpkit: {name} is ended: {error}{after}\n".encode("utf-8", "replace"))
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(1)

    def kill(self) -> None:
        """End this process, and so all ranks; any thread may call this."""
        self.stopped = True
        name = self._launcher.names[self._launcher.rank]
        error = self.error or MpkitError(f"this run was stopped on {name}")
        threading.Thread(target=self._end_process, args=(error,), name="mpkit-end", daemon=True).start()

    @property
    def trace(self) -> Trace:
        """On rank 0 the trace of all ranks, of which those on other nodes come at the end; elsewhere this node's."""
        if not self.leads and (self.has_ended or not self._watches):
            raise MpkitError(
                f"the traces of all ranks come together on rank 0, and this is rank {self._launcher.rank}: "
                "`if cluster.rank == 0:` before what reads or draws them, such as run.timeline(). run.losses, "
                "run.state_dict() and the results of cluster.run are the same on every rank."
            )
        return super().trace

    @property
    def losses(self) -> list[float]:
        """The loss of every step so far; on other ranks than 0, once the run is over."""
        return self._losses if self.has_ended or not self.leads else self.trace.losses

    def _open_result(self, rank: int) -> IO[bytes]:
        return io.BytesIO(self._results[rank])


def _folder_of_node(launcher: Launcher) -> Path:
    """Return the folder that the ranks of this node share, which its first rank makes."""
    made = ""
    if launcher.rank == launcher.first:
        made = str(empty_folder())
        reserve(Path(made), launcher.ranks)
    path = Path(launcher.tell(made)[launcher.first])
    if not path.is_dir() or path.stat().st_uid != os.geteuid():
        raise MpkitError(
            f"{launcher.names[launcher.rank]} does not see {path}, which the first rank of its node has made: ranks of "
            "one node share a folder. TMPDIR=... names one that all of them see, such as a bind mount of containers"
        )
    return path


def _drift(clocks: list[tuple[int, int, int]]) -> int:
    """Return by how many ns two measurements of a clock differ, each (when, offset, its error); 0 within the errors."""
    (_, before, error), (_, after, error_after) = clocks
    return after - before if abs(after - before) > error + error_after else 0

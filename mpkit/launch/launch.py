"""One launch, from the payload to its outcome, as `Cluster` and `Run` see it; and the launch of ranks started here.

start     write the folder that the ranks read (`run_folder`), and ask the fork server to fork them
watch     handle events, show output (`sink`), look for hangs (`hang/hang.py`); one thread polls until it is over
end       end all ranks, whatever they and the fork server do
outcome   results by rank, or the error of the rank that failed first (`failure`)

`Helper` is what a Cluster prepares ahead: the fork server; and a thread that imports what the first training needs.
Preparing one runs the model on fake tensors, for which torch imports its compiler (torch._dynamo) and sympy: about a
second in a fresh process, which `import torch` spares those who do not need it. The thread begins with this when a
Cluster is made, as its fork server begins to import torch, and `train` waits for the rest.
"""

import gc
import importlib
import os
import pickle
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mpkit.common.exceptions import one_line
from mpkit.common.launch_folder import Settings, part
from mpkit.errors import MpkitError, RankFailed
from mpkit.launch.failure import failure
from mpkit.launch.gpu_sampler import GpuSampler
from mpkit.launch.hang.hang import LOOK_EVERY, HangWatch
from mpkit.launch.process.fork_server import FROM, STOPPED, STOPPED_FOR, ForkServerClient
from mpkit.launch.process.output import OutputReader
from mpkit.launch.process.processes import RankProcesses, is_stopped
from mpkit.launch.process.run_folder import new_folder
from mpkit.trace import Trace

KILL_TAKES = 5.0
"""Seconds within which killed ranks have exited, if the fork server answers."""


class RankLaunch:
    """Ranks that run one function: forked here (`Launch`), or started by a launcher (`LaunchedRank`)."""

    leads = True  # whether this process has the trace of all ranks, as it always has on one machine
    hangs: HangWatch
    folder: Path  # where the ranks write

    def __init__(self, ranks: int, meta: dict[str, Any]) -> None:
        self.ranks, self.meta = ranks, meta  # `meta` becomes the trace's
        self.error: Exception | None = None
        self.stopped = self.has_ended = False  # somebody has ended it; it is over, however it ended
        self._processes = RankProcesses()
        self._trace: Trace | None = None

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids; empty until the ranks are started."""
        return self._processes.pids

    @property
    def losses(self) -> list[float]:
        """The loss of every step so far."""
        return self.trace.losses

    @property
    def trace(self) -> Trace:
        """The trace that the ranks have recorded so far, or all of it once they have exited."""
        if self._trace is not None:
            return self._trace
        is_whole = self.has_ended  # asked first: ranks may exit while their files are read
        trace = Trace.read(self.folder)
        if is_whole:
            self._trace = trace
        return trace

    def poll(self, wait: float) -> bool:
        """Process what happens within `wait` seconds and return whether the launch is over."""
        raise NotImplementedError

    def work(self) -> None:
        """Let the ranks do their work, and return when the launch is over."""
        self.finish()

    def finish(self, pause: float = LOOK_EVERY, tick: Callable[[], None] = lambda: None) -> None:
        """Poll until the launch is over; an exception meanwhile (Ctrl-C, an unreadable trace) ends the ranks first."""
        try:
            while not self.poll(pause):
                tick()
        except BaseException as error:
            self.end(error)
            raise

    def kill(self) -> None:
        """Kill all ranks without waiting; what they recorded stays. Thread-safe."""
        raise NotImplementedError

    def end(self, error: BaseException | None = None) -> None:
        """Kill all ranks unless the launch is over, which ends with `error`; None: the user ended it. Thread-safe."""
        if error is not None and self.error is None:
            ended = f"the thread that follows the ranks was ended by {type(error).__name__}"
            self.error = error if isinstance(error, Exception) else MpkitError(ended)
        if not self.has_ended:
            self.kill()

    def raise_error(self) -> None:
        """Raise the error of the launch, if there is one.

        If nothing reads this program's output (`python train.py | head -1`), it ends as other programs do: with exit
        code 141 (128 + SIGPIPE) and without a traceback.
        """
        out: Any = sys.stdout
        if isinstance(self.error, BrokenPipeError) and out is not None and out == sys.__stdout__:
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # Python flushes stdout at exit
            raise SystemExit(128 + 13)
        if self.error is not None:
            raise self.error.with_traceback(None)  # without the frames of an earlier raise

    def results(self, load: Callable[[IO[bytes]], Any] = pickle.load) -> list[Any]:
        """Return what the function returned, by rank, or raise the error of the launch.

        Pass another `load` to read the results of ranks that are not trusted.
        """
        assert self.has_ended, "asked for results before the launch was over"
        self.raise_error()
        if self.stopped:
            raise MpkitError("this run was stopped before its end: there are no results")
        results = []
        for rank in range(self.ranks):
            with self._open_result(rank) as file:
                results.append(load(file))
        return results

    def _open_result(self, rank: int) -> IO[bytes]:
        return part(self.folder, rank, "result").open("rb")


class Launch(RankLaunch):
    """A launch of ranks that this process starts; `fork_server` forks them once it has imported torch.

    Args:
        settings, payload: what the ranks read; `payload` is what `pack` returned.
        timeout: see `mpkit.launch.hang.hang.Patience`.
        sink: receives labelled lines of output. If it raises, it receives no more lines and the ranks continue; a
            BrokenPipeError, which means that nothing reads this program's output, ends them.
        modules: modules that the ranks need and that do not change, to be imported before the ranks are forked.
    """

    def __init__(
        self, fork_server: ForkServerClient, settings: Settings, payload: bytes, *, timeout: float | None,
        sink: Callable[[str], None], meta: dict[str, Any], modules: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._sampler = GpuSampler(settings)
        facts = {"world_size": settings.ranks, "device": settings.device, "backend": settings.backend}
        super().__init__(settings.ranks, {**facts, **self._sampler.meta, **meta})
        self._fork_server = fork_server
        self.folder = new_folder(settings, self.meta, payload)
        # Not at exit, when the process's folder goes with all that lie in it.
        weakref.finalize(self, _remove, self.folder).atexit = False
        weakref.finalize(self, self._sampler.close)
        self._sink, self._is_heard = sink, True
        self._output = OutputReader(self.folder, self.ranks)
        self.hangs = HangWatch(self.folder, self.ranks, self._processes, timeout, range(self.ranks))
        self._polling = threading.RLock()
        self._looked, self._looking = 0.0, False  # a look polls while it asks ranks where they are
        self._stopped_since: float | None = None  # when the fork server was first seen stopped
        self._killed_at: float | None = None
        self._sampler.start(self.folder)
        # The ranks start now, or as soon as the fork server has imported torch.
        fork_server.tell("launch", folder=str(self.folder), ranks=self.ranks, modules=list(modules))

    def poll(self, wait: float) -> bool:
        """Process what happens within `wait` seconds and return whether the launch is over."""
        with self._polling:
            if not self.has_ended:
                self._take_events(wait)
            if not self.has_ended and not self._looking and time.monotonic() - self._looked > LOOK_EVERY:
                self._looked, self._looking = time.monotonic(), True
                try:
                    self._look()
                finally:
                    self._looking = False
        return self.has_ended

    def _take_events(self, wait: float) -> None:
        for event in self._fork_server.events(wait):
            if event["event"] == "gone":
                self._force(MpkitError(event["why"]))
            elif event["event"] == "started":
                self._processes.pids = list(event["pids"])
            elif event["event"] == "exit":
                self._processes.statuses.setdefault(event["rank"], event["status"])
            elif event["event"] == "over":
                self._finish(None)
            if self.has_ended:
                return
        if self._killed_at is not None and time.monotonic() - self._killed_at > KILL_TAKES:
            self._force(MpkitError(f"{FROM} did not answer; it has been ended"))

    def _look(self) -> None:
        stopped = is_stopped(self._fork_server.pid)
        self._stopped_since = (self._stopped_since or self._looked) if stopped else None
        if self._stopped_since is not None and self._looked - self._stopped_since > STOPPED_FOR:
            return self._force(MpkitError(STOPPED.format(pid=self._fork_server.pid)))
        self._show(self._output.lines())
        if self.error is None and self._killed_at is None and self.pids and self.hangs.look(self):
            self.give_up()

    def show_output(self) -> None:
        """Show what the ranks have printed by now."""
        with self._polling:
            self._show(self._output.lines())

    def say(self, line: str) -> None:
        """Show a line where the ranks' output is shown."""
        self._show([line])

    def _show(self, lines: Iterable[str]) -> None:
        """Pass lines on until that fails; end the ranks if nothing reads this program's output any more."""
        for line in lines:
            try:
                if self._is_heard:
                    self._sink(line)
            except BrokenPipeError as error:
                self._is_heard = False
                if self.error is None:
                    self.error = error
                    self._kill_ranks()
            except Exception as error:
                self._is_heard = False
                warn = f"mpkit: what the ranks print cannot be shown any more ({one_line(error)}); they go on"
                with suppress(OSError, ValueError, AttributeError):  # standard error may be closed as well
                    print(warn, file=sys.stderr)

    def give_up(self) -> None:
        """End all ranks as hung, with a report of which rank waits where. For `poll` and its callers."""
        error = self.hangs.verdict(self)
        if error is not None:  # the launch has not ended while the ranks were asked where they are
            self.error = error
            self._kill_ranks()

    def kill(self) -> None:
        """Kill all ranks, and what they have started."""
        self.stopped = True
        self._kill_ranks()

    def end(self, error: BaseException | None = None) -> None:
        """Kill all ranks, and return when they have exited and the cluster can be used again."""
        with self._polling:
            super().end(error)
            while not self.poll(0.05):
                if not self._fork_server.own_pid:  # it imports torch still
                    self._force(None)

    def _kill_ranks(self) -> None:
        if self._killed_at is None:
            self._killed_at = time.monotonic()
        self._fork_server.tell("kill")

    def _force(self, error: MpkitError | None) -> None:
        """Kill all ranks and the fork server without the fork server's help."""
        self._processes.kill()
        self._fork_server.kill()
        self._finish(error)

    def _finish(self, error: MpkitError | None) -> None:
        """Conclude the launch once the ranks have exited: find the outcome, show the last output, close files."""
        statuses = self._processes.statuses
        self._sampler.close()
        try:
            if self.error is None and not self.stopped:
                lost = error is not None and not statuses
                self.error = RankFailed(str(error)) if lost else failure(self.folder, statuses, self.trace)
        except Exception as unreadable:
            self.error = unreadable
        finally:
            self.has_ended = True
            self.hangs.close()
            self._show(self._output.lines(last=True))


def _remove(folder: Path) -> None:
    """Remove a folder in a thread: the launch that takes this one's place need not wait for the disk."""
    threading.Thread(target=shutil.rmtree, args=(folder, True), name="mpkit-remove", daemon=True).start()


class Helper:
    """What a cluster shares with those that `resized` makes of it: the process that their ranks are forked from.

    `start` starts a fork server; it is None under a launcher, whose processes are the ranks.
    """

    def __init__(self, start: Callable[[], ForkServerClient] | None) -> None:
        self._start = start
        self.fork_server = None if start is None else start()  # the latest one
        self.latest: RankLaunch | None = None  # one launch may run at a time
        self.training: Any = None  # the latest one
        self.closed = False  # whether one of the clusters was closed
        self.launching = threading.Lock()  # held while a thread checks whether it is busy, and launches

    def provide(self) -> ForkServerClient:
        """Return a fork server that is alive: one ends by itself when nobody has used it for minutes."""
        assert self._start is not None and self.fork_server is not None  # no launcher started this process
        if not self.fork_server.alive:
            self.fork_server.close()
            self.fork_server = self._start()
        return self.fork_server


NEEDED = (
    "sympy", "torch.distributed.tensor", "torch._dynamo", "mpkit.strategies.prepare.prepare",
    "mpkit.launch.session.run",
)  # fmt: skip
"""What `train` imports at its first call. Each is imported after what it imports itself, so that a thread that imports
one of them at the same time waits for it, rather than for a ring of modules that wait for each other."""


def import_ahead() -> threading.Thread:
    """Start a thread that imports these modules, and return it.

    It is not a daemon: an interpreter that ends while it imports would abort in the middle of torch's C++ code. An
    import that fails here fails in `train` too, where the error is reported.
    """

    def import_needed() -> None:
        collects = gc.isenabled()
        gc.disable()  # what imports create stays: looking for garbage in it takes a quarter of their time
        try:
            with suppress(ImportError):
                for name in NEEDED:
                    importlib.import_module(name)
        finally:
            if collects:
                gc.enable()

    thread = threading.Thread(target=import_needed, name="mpkit-import-ahead", daemon=False)
    thread.start()
    return thread

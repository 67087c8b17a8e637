"""The parent's half: one launch, from the payload to its outcome.

poll      handle events, output and timeouts; called by one thread until the launch is over
end       end all ranks, whatever they and the fork server do
outcome   results by rank, or the error of the rank that failed first
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from mpkit.errors import Deadlock, MpkitError, RankFailed
from mpkit.launch.failure import failure
from mpkit.launch.hang.hang import GRACE, LIMIT, Patience, explain
from mpkit.launch.hang.progress import Watch
from mpkit.launch.hang.unmatched import first_mismatch
from mpkit.launch.hang.waiting import IDLE, NOTICE_AFTER, Waiting, ranks_spelt, stopped_words
from mpkit.launch.output_reader import OutputReader
from mpkit.launch.process.folder import RESERVED, Settings, part, reserve
from mpkit.launch.process.fork_server_client import STOPPED, STOPPED_FOR, ForkServerClient
from mpkit.launch.process.stacks import place_of, read_stack, request_stack
from mpkit.launch.process.vitals import is_stopped
from mpkit.support.disk import name_full_disk
from mpkit.trace import Trace

__all__ = ["Launch"]

LOOK_EVERY = 0.1
"""Seconds between two checks of the ranks' progress."""

STACKS_TAKE = 0.6
"""Seconds that ranks are given to write their stacks, from their own thread and then on a signal."""

SAID_RANKS = 4
"""The number of awaited ranks whose location is reported."""

KILL_TAKES = 5.0
"""Seconds within which killed ranks have exited, if the fork server answers."""


class Launch:
    """Ranks that run one function.

    Args:
        fork_server: the process that forks the ranks.
        settings: the settings that every rank reads.
        payload: the bytes that `pack` returned.
        timeout, grace: see `mpkit.launch.hang.hang.Patience`.
        sink: receives labelled lines of output. If it raises, it receives no more lines and the ranks continue; a
            BrokenPipeError, which means that nothing reads this program's output, ends them.
        flush: called after lines have been passed to `sink`.
        meta: data for the trace's meta.
        modules: modules that the ranks need; see `ForkServerClient.launch`.

    Raises:
        OSError: the disk has no space for the files that the ranks need.
    """

    def __init__(
        self,
        fork_server: ForkServerClient,
        settings: Settings,
        payload: bytes,
        *,
        timeout: float | None,
        sink: Callable[[str], None],
        flush: Callable[[], None] = lambda: None,
        meta: dict[str, Any],
        modules: Sequence[str] = (),
        grace: float = GRACE,
    ) -> None:
        self.ranks = settings.ranks
        self.over = False
        self.error: Exception | None = None
        self.stopped = False
        self.waiting_for: str | None = None  # the notice of a long wait, in words
        self.pids: list[int] = []  # by rank, once the ranks are started
        self.meta = {"world_size": self.ranks, "device": settings.device, "backend": settings.backend, **meta}
        self._fork_server, self._modules = fork_server, modules
        self.folder = self._write(settings, payload)
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._sink: Callable[[str], None] | None = sink
        self._flush = flush
        self._statuses: dict[int, int] = {}  # exit status by rank, in the order in which they ended
        self._watch = Watch(self.folder, self.ranks)
        self._patience = Patience(timeout, grace)
        self._output = OutputReader(self.folder, self.ranks)
        self._polling = threading.RLock()
        self._waiting = Waiting(NOTICE_AFTER)
        self._noticed: set[str] = set()
        self._looked = 0.0
        self._stopped_looks = 0  # consecutive looks that found the fork server stopped
        self._killed_at: float | None = None
        self._trace: Trace | None = None
        self._id: int | None = None  # set by the first poll, which starts the ranks

    def _write(self, settings: Settings, payload: bytes) -> Path:
        """Create the launch's folder with all files that the ranks read."""
        files = {
            "settings.json": settings.dumps(),
            "meta.json": json.dumps(self.meta).encode(),
            "payload.pkl": payload,
        }
        needed = sum(map(len, files.values())) + self.ranks * sum(RESERVED.values())
        with name_full_disk(tempfile.gettempdir(), needed):
            folder = Path(tempfile.mkdtemp(prefix="mpkit-run-"))
            self._fork_server.tell(
                do="folder", folder=str(folder)
            )  # so that it removes the folder if this process is killed
            try:
                for name, content in files.items():
                    (folder / name).write_bytes(content)
                reserve(folder, self.ranks)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return folder

    @property
    def trace(self) -> Trace:
        """The trace that the ranks have recorded so far, or all of it once they have exited."""
        if self._trace is not None:
            return self._trace
        trace = Trace.read(self.folder)
        if self.over:
            self._trace = trace
        return trace

    # ---- while it runs ------------------------------------------------------------------------------------

    def poll(self, wait: float) -> bool:
        """Process what happens within `wait` seconds and return whether the launch is over.

        The first call starts the ranks; if necessary it waits until the fork server has imported torch.
        """
        with self._polling:
            if self._id is None and not self.over:
                self._start()
            if not self.over:
                self._take_events(wait)
            if not self.over and time.monotonic() - self._looked > LOOK_EVERY:
                self._looked = time.monotonic()
                self._look()
        return self.over

    def finish(self, pause: float = LOOK_EVERY, tick: Callable[[], None] = lambda: None) -> None:
        """Poll until the launch is over; an exception meanwhile (Ctrl-C, an unreadable trace) ends the ranks first.

        Args:
            pause: seconds per poll.
            tick: called after each poll.
        """
        try:
            while not self.poll(pause):
                tick()
        except BaseException as error:
            self.end(error)
            raise

    def kill(self) -> None:
        """Kill all ranks without waiting; what they recorded stays. Any thread may call this."""
        self.stopped = True
        self._kill_ranks()

    def end(self, error: BaseException | None = None) -> None:
        """Kill all ranks and return when they have exited and the cluster can be used again. Any thread may call this.

        Args:
            error: the error that the launch ends with; None: the user ended it.
        """
        if error is not None and self.error is None:
            self.error = error if isinstance(error, Exception) else MpkitError(_spell_interrupt(error))
        self.kill()
        while not self.over:
            if self._polling.acquire(timeout=LOOK_EVERY):  # otherwise the polling thread handles it
                try:
                    if self._id is None:
                        self._finish(None)
                    elif not self.over:
                        self._take_events(0.05)
                finally:
                    self._polling.release()

    def _start(self) -> None:
        try:
            self._fork_server.wait_ready()
        except MpkitError as error:
            self._finish(error)
            return
        if self.stopped:
            self._finish(None)
            return
        self._id = self._fork_server.launch(str(self.folder), self.ranks, self._modules)
        if self.stopped:  # by another thread in the meantime
            self.kill()

    def _take_events(self, wait: float) -> None:
        assert self._id is not None
        for event in self._fork_server.events(self._id, wait):
            if event["event"] == "gone":
                self._force(MpkitError("the process that ranks are started from has died"))
            elif event["event"] == "started":
                self.pids = list(event["pids"])
            elif event["event"] == "exit":
                self._statuses.setdefault(event["rank"], event["status"])
            elif event["event"] == "over":
                self._finish(None)
            if self.over:
                return
        if self._killed_at is not None and time.monotonic() - self._killed_at > KILL_TAKES:
            self._force(
                MpkitError("the process that ranks are started from did not answer; it has been ended")
            )

    def _look(self) -> None:
        self._stopped_looks = self._stopped_looks + 1 if is_stopped(self._fork_server.pid) else 0
        if self._stopped_looks * LOOK_EVERY > STOPPED_FOR:
            self._force(MpkitError(STOPPED.format(pid=self._fork_server.pid)))
            return
        self._show_output()
        self._check_for_hang()

    def _show_output(self, last: bool = False) -> None:
        """Pass new lines to the sink. A sink that fails receives no more."""
        shown = False
        for line in self._output.lines(last):
            shown = self._tell_sink(line) or shown
        if shown:
            self._tell_sink(None)

    def _tell_sink(self, line: str | None) -> bool:
        """Pass a line to the sink, or flush it if the line is None; return whether it succeeded."""
        if self._sink is None:
            return False
        try:
            self._flush() if line is None else self._sink(line)
        except Exception as error:
            self._sink = None
            if isinstance(error, BrokenPipeError):
                self.error = self.error or error
                self._kill_ranks()
            else:
                with contextlib.suppress(
                    OSError, ValueError, AttributeError
                ):  # standard error may be closed as well
                    print(
                        "mpkit: what the ranks print cannot be shown any more "
                        f"({type(error).__name__}: {error}); they go on",
                        file=sys.stderr,
                    )
            return False
        return True

    def _kill_ranks(self) -> None:
        if self._killed_at is None:
            self._killed_at = time.monotonic()
        if self._id is not None:
            self._fork_server.tell(do="kill", id=self._id)

    def _force(self, error: MpkitError) -> None:
        """Kill all ranks and the fork server without the fork server's help."""
        living = [pid for rank, pid in enumerate(self.pids) if rank not in self._statuses]
        if living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pids[0], signal.SIGKILL)
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._fork_server.kill()
        self._finish(error)

    def _check_for_hang(self) -> None:
        if self.error is not None or self._killed_at is not None:
            return
        sights = self._watch.look_at_all()
        trace = self.trace if self._patience.wants_trace(sights) else None
        stopped = self._stopped_ranks() if self._patience.still > 0.3 or self._patience.holds else {}
        if self._patience.is_over(sights, trace, stopped):
            self.give_up()
            return
        waiting, others = self._waiting.look(sights, self.pids)
        if not others:
            self.waiting_for = None
        elif self.waiting_for is None:
            self._notice(waiting, others)

    def _stopped_ranks(self) -> dict[int, int]:
        """Return the process ids, by rank, of the ranks stopped by SIGSTOP."""
        return {rank: pid for rank, pid in enumerate(self.pids) if is_stopped(pid)}

    def _notice(self, waiting: list[int], others: list[int]) -> None:
        """Print for which ranks others wait and where those are, once for each place."""
        stacks = self._stacks(others)
        if self.over:
            return
        stopped = self._stopped_ranks()
        places = []
        for rank in others[:SAID_RANKS]:
            share = self._waiting.cpu_share(rank, self.pids)
            busy = "" if share is None else ", using CPU time" if share >= IDLE else ", using no CPU time"
            place = place_of(stacks[rank])
            places.append(
                stopped_words(rank, stopped[rank])
                if rank in stopped
                else f"rank {rank} {f'is at {place}' if place else 'is in C code'}{busy}"
            )
        more = [f"{len(others) - SAID_RANKS} more"] * (len(others) > SAID_RANKS)
        for_whom = f"for {ranks_spelt(others)}" if waiting != others else "and none uses CPU time"
        have = "has" if len(waiting) == 1 else "have"
        self.waiting_for = (
            f"{ranks_spelt(waiting)} {have} waited for {self._waiting.after:g} s {for_whom}: "
            + "; ".join(places + more)
        )
        if self.waiting_for not in self._noticed:
            self._noticed.add(self.waiting_for)
            limit = self._patience.timeout or LIMIT
            if self._tell_sink(f"mpkit: {self.waiting_for}. (An error after {limit:g} s: timeout=...)"):
                self._tell_sink(None)

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the Python stacks of these ranks, "" for a rank that does not answer.

        Exits of ranks are handled meanwhile.
        """
        paths = {rank: part(self.folder, rank, "stack") for rank in ranks}
        ends = {rank: path.stat().st_size if path.exists() else 0 for rank, path in paths.items()}
        found = dict.fromkeys(ranks, "")
        stopped = self._stopped_ranks()
        for by_signal in (False, True):
            missing = [rank for rank in ranks if not found[rank] and rank not in stopped]
            for rank in missing:
                if by_signal and rank < len(self.pids) and rank not in self._statuses:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self.pids[rank], signal.SIGUSR1)
                else:
                    request_stack(self.folder, rank)
            deadline = time.monotonic() + STACKS_TAKE
            while missing and time.monotonic() < deadline and not self.over:
                self._take_events(0.02)
                found |= {rank: read_stack(self.folder, rank, ends[rank]) for rank in missing}
                missing = [rank for rank in missing if not found[rank]]
        return found

    def give_up(self) -> None:
        """End all ranks as hung, with a report of which rank waits where. For `poll` and its callers."""
        trace, now, stopped = self.trace, time.monotonic_ns(), self._stopped_ranks()
        still = self._patience.still
        stacks = self._stacks(range(self.ranks))
        if self.over:
            return
        self.error = first_mismatch(trace) or Deadlock(explain(trace, stacks, still, now, stopped))
        self._kill_ranks()

    # ---- after it has ended -------------------------------------------------------------------------------

    def _finish(self, error: MpkitError | None) -> None:
        """Conclude the launch once the ranks have exited: find the outcome, show the last output, close files."""
        try:
            if self.error is None and not self.stopped:
                lost = error is not None and not self._statuses
                self.error = (
                    RankFailed(str(error)) if lost else failure(self.folder, self._statuses, self.trace)
                )
        except Exception as unreadable:
            self.error = unreadable
        finally:
            self.over = True
            self._watch.close()
            if self._id is not None:
                self._fork_server.forget(self._id)
            self._show_output(last=True)

    def raise_error(self) -> None:
        """Raise the error of the launch, if there is one.

        If nothing reads this program's output (`python train.py | head -1`), it ends as other programs do: with exit
        code 141 (128 + SIGPIPE) and without a traceback.
        """
        if self.error is None:
            return
        if (
            isinstance(self.error, BrokenPipeError)
            and sys.stdout is sys.__stdout__
            and sys.stdout is not None
        ):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
            raise SystemExit(128 + 13)
        raise self.error.with_traceback(None)  # without the frames of an earlier raise

    def results(self, load: Callable[[IO[bytes]], Any] = pickle.load) -> list[Any]:
        """Return what the function returned, by rank, or raise the error of the launch.

        Args:
            load: reads a result's file; replace it if the ranks are not trusted.

        Raises:
            MpkitError: the launch was stopped before its end.
        """
        assert self.over, "asked for results before the launch was over"
        self.raise_error()
        if self.stopped:
            raise MpkitError("this run was stopped before its end: there are no results")
        return [self.result(rank, load) for rank in range(self.ranks)]

    def result(self, rank: int, load: Callable[[IO[bytes]], Any] = pickle.load) -> Any:
        """Return what the function returned on one rank."""
        with part(self.folder, rank, "result").open("rb") as file:
            return load(file)


def _spell_interrupt(error: BaseException) -> str:
    return f"the thread that follows the ranks was ended by {type(error).__name__}"

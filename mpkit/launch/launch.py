"""The parent's half: one launch, from the payload to its outcome.

pack      function and arguments by value into the launch's folder, the ranks started from the warm process
poll      events, output, time-outs; called by one thread until the launch is over
outcome   results by rank, or the error that the first failing rank left
"""

from __future__ import annotations

import json
import linecache
import os
import pickle
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import cloudpickle

from mpkit.errors import Deadlock, MpkitError, RankFailed
from mpkit.launch.failure import failure
from mpkit.launch.folder import Settings, part
from mpkit.launch.hang import GRACE, Patience, explain
from mpkit.launch.output import OutputReader
from mpkit.launch.warm import Warm
from mpkit.launch.watch import Watch
from mpkit.trace import Trace

__all__ = ["Launch", "pack"]

LOOK_EVERY = 0.1
"""Seconds between two looks at what the ranks do."""

STACKS_TAKE = 0.3
"""Seconds that ranks get to write their stacks before they are killed."""


class Launch:
    """Ranks that run one function.

    Args:
        warm: where ranks come from.
        settings: what every rank is told.
        payload: what `pack` made.
        timeout, grace: see `mpkit.launch.hang.Patience`.
        sink: takes a labelled line of output.
        meta: goes into the trace's meta.
        modules: that the ranks need; see `Warm.launch`.
    """

    def __init__(
        self,
        warm: Warm,
        settings: Settings,
        payload: bytes,
        *,
        timeout: float | None,
        sink: Callable[[str], None],
        meta: dict[str, Any],
        modules: Sequence[str] = (),
        grace: float = GRACE,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mpkit-run-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.ranks = settings.ranks
        self.over = False
        self.error: RankFailed | None = None
        self.stopped = False
        self.pids: list[int] = []  # by rank, once they are started
        self._warm, self._modules = warm, modules
        self._sink = sink
        self._statuses: dict[int, int] = {}  # exit status by rank, in the order in which they ended
        self._watch = Watch(self.folder, self.ranks)
        self._patience = Patience(timeout, grace)
        self._output = OutputReader(self.folder, self.ranks)
        self._looked = 0.0
        self._trace: Trace | None = None
        settings.write(self.folder)
        (self.folder / "payload.pkl").write_bytes(payload)
        self.meta = {"world_size": self.ranks, "device": settings.device, "backend": settings.backend, **meta}
        (self.folder / "meta.json").write_text(json.dumps(self.meta))
        self._id: int | None = None  # set when the ranks are started, by the first poll

    @property
    def trace(self) -> Trace:
        """What the ranks have recorded so far, or, when they are gone, all of it."""
        if self._trace is not None:
            return self._trace
        trace = Trace.read(self.folder)
        if self.over:
            self._trace = trace
        return trace

    def poll(self, wait: float) -> bool:
        """Take in what happens within `wait` seconds; returns whether the launch is over.

        The first call starts the ranks, waiting for torch to be imported in the warm process if need be.
        """
        if self._id is None and not self.over:
            self._start()
        for event in [] if self.over else self._warm.events(wait):
            if event["event"] == "gone":
                self._finish(MpkitError("the process that ranks are started from has died"))
            elif event.get("id") != self._id:
                continue  # of an earlier launch
            elif event["event"] == "started":
                self.pids = list(event["pids"])
            elif event["event"] == "exit":
                self._statuses.setdefault(event["rank"], event["status"])
            elif event["event"] == "over":
                self._finish(None)
        now = time.monotonic()
        if not self.over and now - self._looked > LOOK_EVERY:
            self._looked = now
            self._output.pump(self._sink)
            self._check_for_hang()
        return self.over

    def kill(self) -> None:
        """End all ranks at once; what they recorded stays. May be called from any thread."""
        self.stopped = True
        if self._id is not None:
            self._warm.tell(do="kill", id=self._id)

    def _start(self) -> None:
        try:
            self._warm.wait_ready()
        except MpkitError as error:
            self._finish(error)
            return
        if self.stopped:
            self._finish(None)
            return
        self._id = self._warm.launch(str(self.folder), self.ranks, self._modules)
        if self.stopped:  # meanwhile, by another thread
            self.kill()

    def finish(self, pause: float = LOOK_EVERY) -> None:
        """Poll until it is over; an exception on the way (Ctrl-C) ends the ranks first."""
        try:
            while not self.poll(pause):
                pass
        except BaseException:
            self.kill()
            deadline = time.monotonic() + 5.0
            while not self.poll(0.05) and time.monotonic() < deadline:
                pass
            raise

    def results(self, load: Callable[[IO[bytes]], Any] = pickle.load) -> list[Any]:
        """What the function returned, by rank; raises what went wrong instead.

        Args:
            load: reads a result's file; for who does not trust the ranks.
        """
        assert self.over, "asked for results before the launch was over"
        if self.error is not None:
            raise self.error
        return [self.result(rank, load) for rank in range(self.ranks)]

    def result(self, rank: int, load: Callable[[IO[bytes]], Any] = pickle.load) -> Any:
        """What the function returned on one rank."""
        with part(self.folder, rank, "result").open("rb") as file:
            return load(file)

    def _check_for_hang(self) -> None:
        if self.error is not None:
            return
        sights = self._watch.look_at_all()
        trace = self.trace if self._patience.wants_trace(sights) else None
        if self._patience.is_over(sights, trace):
            self.give_up()

    def give_up(self) -> None:
        """End all ranks as hung, with the report of who waits where; for `poll` and who calls it."""
        self._warm.tell(do="stacks", id=self._id)
        deadline = time.monotonic() + STACKS_TAKE
        while time.monotonic() < deadline:  # exits that happen meanwhile are taken in
            for event in self._warm.events(0.05):
                if event["event"] == "exit" and event["id"] == self._id:
                    self._statuses.setdefault(event["rank"], event["status"])
        stacks = {rank: _read(part(self.folder, rank, "stack")) for rank in range(self.ranks)}
        message = explain(self.trace, stacks, self._patience.still, time.monotonic_ns())
        self.error = Deadlock(message)
        self._warm.tell(do="kill", id=self._id)

    def _finish(self, error: MpkitError | None) -> None:
        self.over = True
        self._output.pump(self._sink)
        if self.error is None and not self.stopped:
            lost = error is not None and not self._statuses
            self.error = RankFailed(str(error)) if lost else failure(self.folder, self._statuses, self.trace)


def pack(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Function and arguments as bytes; what lives in a notebook, script or REPL goes by value.

    Raises:
        ValueError: something in them cannot leave this process (a lock, an open file, a generator).
    """
    try:
        return bytes(cloudpickle.dumps((function, tuple(args))))
    except Exception as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"{name} or what it uses cannot be sent to other processes ({type(error).__name__}: {error}). "
            "Locks, open files, sockets, generators and widgets stay in the process that made them: create such "
            "things inside the function, or pass the plain data they hold."
        ) from error


def here(ranks: int, device: str, backend: str, devices: int, layers: bool) -> Settings:
    """The settings of a launch from this process, as it is now."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Settings(
        ranks=ranks,
        device=device,
        backend=backend,
        devices=devices,
        threads=1 if device == "cpu" else max(1, cores // ranks),
        path=[os.path.abspath(p) if p else os.getcwd() for p in sys.path],
        cwd=os.getcwd(),
        argv=list(sys.argv),
        sources=_sources_without_file(),
        layers=layers,
    )


def _sources_without_file() -> dict[str, str]:
    """Notebook cells and REPL input, whose lines a rank's traceback should show."""
    found: dict[str, str] = {}
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and not os.path.exists(name) and len(found) < 2000:
            found[name] = "".join(entry[2])
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""

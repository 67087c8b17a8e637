"""Running a command under limits, enclosed as far as the system can, and ending all that it leaves behind.

start    start the command enclosed (`enclose`), in a session of its own
watch    check ten times per second its time, its memory and its number of processes, whatever they call themselves
sweep    end all of its processes, and the orphans among them, which this process adopts (as a subreaper, on Linux)
"""

import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import psutil

from mpkit.common.units import memory_text
from mpkit.course.sandbox import enclose
from mpkit.course.sandbox.fair_clock import FairClock

Keep = Callable[[], set[int]]

LOOK_EVERY = 0.1
IMPORTS_TAKE = 120.0
"""Seconds that a process may take to import torch; they do not count as the notebook's time."""

TOO_BUSY = "this machine is too busy"
"""The end of the reason why a command did not even start."""


@dataclass(frozen=True)
class Guard:
    """Limits on a command.

    Attributes:
        seconds: the time from the moment when the command reports that it has started; what its processes queue for a
            core of a busy machine does not count (`FairClock`).
        memory: the most bytes that all its processes hold together, and the most that it writes to files.
        processes: the most processes at one time.
        hidden: the folders that it cannot read, where the system can hide them.
    """

    seconds: float = 120.0
    memory: int = 4 * 2**30
    processes: int = 40
    hidden: tuple[str, ...] = ()

    def run(
        self, command: Sequence[str], place: Path, folder: Path, environment: dict[str, str], keep: Keep,
        started: Path,
    ) -> str:  # fmt: skip
        """Run a command until it ends or exceeds a limit; its output is discarded.

        Args:
            command: the command.
            place: the only folder that it may write to.
            folder: the working directory.
            environment: the environment variables that replace ours.
            keep: returns the ids of our child processes that do not belong to the command; they stay alive.
            started: the file that the command makes when its time begins.

        Returns:
            The reason why it did not end well; "" if it did.
        """
        process = subprocess.Popen(
            enclose_command(command, place, self.hidden), cwd=folder, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        clock, most, has_started, why = FairClock(), IMPORTS_TAKE, False, ""
        while not why:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_EVERY)
                break
            if not has_started and started.exists():
                clock, most, has_started = FairClock(), self.seconds, True
            running = others(keep)
            if clock.look(process.pid for process in running) > most:
                why = f"it took more than {self.seconds:g} s"
                if not has_started:
                    why = f"Python and torch had not started after {IMPORTS_TAKE:g} s: {TOO_BUSY}"
            elif (written := _folder_bytes(place)) > self.memory:
                why = f"it wrote {memory_text(written)}; {memory_text(self.memory)} are allowed"
            else:
                why = self.exceeded_limit(running)
        sweep(keep)
        code = process.wait()
        code = 128 - code if code > 128 else code  # how a shell reports a signal that ended a process inside
        if why or not code:
            return why
        if code < 0 and -code in set(signal.Signals):
            return f"killed by {signal.Signals(-code).name}"
        return f"it left with exit code {code}"

    def exceeded_limit(self, running: Sequence[psutil.Process]) -> str:
        """Return which limit these processes exceed; "" for none."""
        if len(running) > self.processes:
            return f"it ran {len(running)} processes; {self.processes} are allowed"
        held = 0
        for process in running:
            with contextlib.suppress(psutil.Error):
                held += process.memory_info().rss
        if held > self.memory:
            return f"it took {memory_text(held)} of memory; {memory_text(self.memory)} are allowed"
        return ""


def enclose_command(
    command: Sequence[str], place: Path, hidden: Sequence[str] = (), way: str | None = None
) -> list[str]:
    """Return a command that runs the given one enclosed, as far as the system can.

    Args:
        command: the command.
        place: the only folder that it writes to.
        hidden: the folders that it cannot read.
        way: one of `enclose.WAYS`; None: the first that works here.
    """
    begin = [sys.executable, "-P", enclose.__file__, way or way_to_enclose()]
    paths = {os.path.realpath(path) for path in hidden if os.path.isdir(path)}
    outermost = [path for path in sorted(paths) if not paths.intersection(map(str, Path(path).parents))]
    return [*begin, os.path.realpath(place), json.dumps(outermost), *command]


@functools.cache
def way_to_enclose() -> str:
    """Return the first of `enclose.WAYS` that works here, one enclosure within another."""
    return next((way for way in enclose.WAYS[:-1] if sys.platform == "linux" and works_here(way)), "none")


def works_here(way: str) -> bool:
    """Return whether a command runs that is enclosed twice, as an answer's ranks within their judge are."""
    with tempfile.TemporaryDirectory(prefix="mpkit-grade-") as place:
        command = [sys.executable, "-c", ""]
        for _ in range(2):
            command = enclose_command(command, Path(place), [], way)
        return not subprocess.run(command, cwd=place, capture_output=True, timeout=60).returncode


def sweep(keep: Keep) -> None:
    """End all descendants of this process except those to keep and their descendants."""
    deadline = time.monotonic() + 5.0
    while (running := others(keep)) and time.monotonic() < deadline:
        for process in running:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(running, timeout=1.0)  # also reaps those that are our children


def others(keep: Keep) -> list[psutil.Process]:
    """Return the descendants of this process, without those to keep and their descendants."""
    children = psutil.Process().children()
    kept = keep()  # evaluated last, so that it has a process that was only just started
    return [each for child in children if child.pid not in kept for each in list_descendants(child.pid)]


def list_descendants(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _folder_bytes(place: Path) -> int:
    """Return the bytes of the files in a folder; of a huge number of files, only some thousands are counted."""
    nbytes = 0
    for name, _, files in islice(os.walk(place), 100):
        for file in files[:100]:
            with contextlib.suppress(OSError):
                nbytes += os.lstat(os.path.join(name, file)).st_size
    return nbytes


def adopt_orphans() -> None:
    """Make this process adopt orphaned descendants from now on, so that `sweep` finds them (Linux only)."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)

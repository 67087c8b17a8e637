"""Running a command under limits, enclosed as far as the system can, and ending all that it leaves behind.

start    start the command enclosed (`enclose`), in a session of its own
watch    check ten times per second its time, its memory and its number of processes, whatever they call themselves
sweep    end all of its processes, and the orphans among them, which this process adopts (as a subreaper, on Linux)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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

from mpkit.classroom.grading import enclose

__all__ = ["Guard", "adopt_orphans", "enclosed", "sweep", "way_to_enclose"]

Keep = Callable[[], set[int]]

LOOK_EVERY = 0.1
IMPORTS_TAKE = 120.0
"""Seconds that a process may take to import torch on a busy machine; they do not count as the notebook's time."""

STOPPED_FOR = 10
"""Consecutive checks for which a process may be stopped (SIGSTOP); after that it would never continue."""


@dataclass(frozen=True)
class Guard:
    """Limits on a command.

    Attributes:
        seconds: the wall time, from the moment when the command reports that it has started.
        memory: the most bytes that all its processes hold together, and the most that it writes to files.
        processes: the most processes at one time.
    """

    seconds: float = 120.0
    memory: int = 4 * 2**30
    processes: int = 40

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
            enclosed(command, place), cwd=folder, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline, has_started, stopped = time.monotonic() + IMPORTS_TAKE, False, 0
        why = ""
        while not why:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_EVERY)
                break
            if not has_started and started.exists():
                deadline, has_started = time.monotonic() + self.seconds, True
            running = others(keep)
            stopped = stopped + 1 if any(map(_is_stopped, running)) else 0
            if time.monotonic() > deadline:
                why = f"it took more than {self.seconds:g} s"
                if not has_started:
                    why = (
                        f"Python and torch had not started after {IMPORTS_TAKE:g} s: this machine is too busy"
                    )
            elif stopped > STOPPED_FOR:
                why = "it stopped itself, or one of its processes (SIGSTOP)"
            elif (written := _written(place)) > self.memory:
                why = f"it wrote {written / 2**30:.1f} GiB; {self.memory / 2**30:g} are allowed"
            else:
                why = self.exceeded(running)
        sweep(keep)
        code = process.wait()
        code = 128 - code if code > 128 else code  # how a shell reports a signal that ended a process inside
        if why or not code:
            return why
        if code < 0 and -code in set(signal.Signals):
            return f"killed by {signal.Signals(-code).name}"
        return f"it left with exit code {code}"

    def exceeded(self, running: Sequence[psutil.Process]) -> str:
        """Return which limit these processes exceed; "" for none."""
        if len(running) > self.processes:
            return f"it ran {len(running)} processes; {self.processes} are allowed"
        held = sum(_resident(process) for process in running)
        if held > self.memory:
            return f"it took {held / 2**30:.1f} GiB of memory; {self.memory / 2**30:g} are allowed"
        return ""


def enclosed(command: Sequence[str], place: Path) -> list[str]:
    """Return a command that runs the given one so that it writes to that folder only, as far as the system can."""
    return [sys.executable, "-P", enclose.__file__, way_to_enclose(), str(place), *command]


@functools.cache
def way_to_enclose() -> str:
    """Return the first of `enclose.WAYS` that works here; each is tried with a command that does nothing."""
    if sys.platform != "linux":
        return "none"
    for way in enclose.WAYS[:-1]:
        with tempfile.TemporaryDirectory(prefix="mpkit-grade-") as place:
            command = [sys.executable, "-P", enclose.__file__, way, place]
            command += [sys.executable, "-c", "import psutil; open('x', 'w')"]
            if not subprocess.run(command, cwd=place, capture_output=True, timeout=60).returncode:
                return way
    return "none"


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
    return _below([child for child in children if child.pid not in kept])


def below(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants."""
    try:
        return _below([psutil.Process(pid)])
    except psutil.Error:
        return []


def _below(level: list[psutil.Process]) -> list[psutil.Process]:
    descendants: list[psutil.Process] = []
    while level:
        descendants += level
        children = []
        for process in level:
            with contextlib.suppress(psutil.Error):
                children += process.children()
        level = children
    return descendants


def _written(place: Path) -> int:
    """Return the bytes of the files in a folder; of a huge number of files, only some thousands are counted."""
    nbytes = 0
    for name, _, files in islice(os.walk(place), 100):
        for file in files[:100]:
            with contextlib.suppress(OSError):
                nbytes += os.lstat(os.path.join(name, file)).st_size
    return nbytes


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP))
    except psutil.Error:
        return False


def adopt_orphans() -> None:
    """Make this process adopt orphaned descendants from now on, so that `sweep` finds them (Linux only)."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)

"""A command under limits, enclosed as far as the system can, of which nothing is left afterwards.

start    enclosed (`enclose`), in a session of its own
watch    ten times a second: how long, how much memory, how many processes, whatever they call themselves
sweep    end all of them, those that left their parents too: they come to us (a subreaper on Linux)
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
"""Seconds until a process has imported torch, on a busy machine: they are not the notebook's."""

STOPPED_FOR = 10
"""Looks in a row at which a process is stopped (SIGSTOP): nobody would ever continue it."""


@dataclass(frozen=True)
class Guard:
    """Limits.

    Attributes:
        seconds: of wall time, from when the command says that it has started.
        memory: bytes, of all its processes together, and of all that it writes.
        processes: at one time.
    """

    seconds: float = 120.0
    memory: int = 4 * 2**30
    processes: int = 40

    def run(
        self, command: Sequence[str], place: Path, folder: Path, environment: dict[str, str], keep: Keep,
        started: Path,
    ) -> str:  # fmt: skip
        """Run it to its end, or to a limit; its output goes nowhere.

        Args:
            place: the only folder that it may write to.
            folder: in which it runs.
            environment: instead of ours.
            keep: gives our children that are not its: they stay.
            started: the file that it makes when its time begins.

        Returns:
            Why it did not end well; "" if it did.
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
            elif stopped > STOPPED_FOR:
                why = "it stopped itself, or one of its processes (SIGSTOP)"
            elif (written := _written(place)) > self.memory:
                why = f"it wrote {written / 2**30:.1f} GiB; {self.memory / 2**30:g} are allowed"
            else:
                why = self.exceeded(running)
        sweep(keep)
        code = process.wait()
        code = 128 - code if code > 128 else code  # of a process within it
        if why or not code:
            return why
        if code < 0 and -code in set(signal.Signals):
            return f"killed by {signal.Signals(-code).name}"
        return f"it left with exit code {code}"

    def exceeded(self, running: Sequence[psutil.Process]) -> str:
        """Which limit these processes exceed; "" for none."""
        if len(running) > self.processes:
            return f"it ran {len(running)} processes; {self.processes} are allowed"
        held = sum(_resident(process) for process in running)
        if held > self.memory:
            return f"it took {held / 2**30:.1f} GiB of memory; {self.memory / 2**30:g} are allowed"
        return ""


def enclosed(command: Sequence[str], place: Path) -> list[str]:
    """The command that runs this one where it writes to that folder only, as far as the system can."""
    return [sys.executable, "-P", enclose.__file__, way_to_enclose(), str(place), *command]


@functools.cache
def way_to_enclose() -> str:
    """The first of `enclose.WAYS` that works here: each is tried with a command that does nothing."""
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
    """End all our descendants but these, and theirs."""
    deadline = time.monotonic() + 5.0
    while (running := others(keep)) and time.monotonic() < deadline:
        for process in running:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(running, timeout=1.0)  # takes their status too, where they are our children


def others(keep: Keep) -> list[psutil.Process]:
    """Our descendants, without these and what is below them."""
    children = psutil.Process().children()
    kept = keep()  # asked for last: one that was only just started is among them
    return _below([child for child in children if child.pid not in kept])


def below(pid: int) -> list[psutil.Process]:
    """A process and its descendants."""
    try:
        return _below([psutil.Process(pid)])
    except psutil.Error:
        return []


def _below(level: list[psutil.Process]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    while level:
        found += level
        children = []
        for process in level:
            with contextlib.suppress(psutil.Error):
                children += process.children()
        level = children
    return found


def _written(place: Path) -> int:
    """Bytes of the files in a folder, of which there may be any number: no more than some thousands are looked at."""
    found = 0
    for name, _, files in islice(os.walk(place), 100):
        for file in files[:100]:
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(name, file)).st_size
    return found


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
    """From now on processes whose parent ends become our children, so that `sweep` finds them; on Linux."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)

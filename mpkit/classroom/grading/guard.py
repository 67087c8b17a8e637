"""A command under limits, of which nothing is left afterwards.

start    in a session of its own
watch    ten times a second: how long, how much memory, how many processes, whatever they call themselves
sweep    end all of them, those that left their parents too: they come to us (a subreaper on Linux)
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Guard", "adopt_orphans"]

LOOK_EVERY = 0.1


@dataclass(frozen=True)
class Guard:
    """Limits.

    Attributes:
        seconds: of wall time.
        memory: bytes, of all its processes together.
        processes: at one time.
    """

    seconds: float = 120.0
    memory: int = 4 * 2**30
    processes: int = 40

    def run(self, command: Sequence[str], folder: Path, environment: dict[str, str], keep: set[int]) -> str:
        """Run it to its end, or to a limit; its output goes nowhere.

        Args:
            folder: in which it runs.
            environment: instead of ours.
            keep: our children that are not its: they stay.

        Returns:
            Why it did not end well; "" if it did.
        """
        process = subprocess.Popen(
            command, cwd=folder, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + self.seconds
        why = ""
        while not why:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_EVERY)
                break
            why = self._exceeded(keep, deadline)
        sweep(keep)
        code = process.wait()
        if why or not code:
            return why
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it left with exit code {code}"

    def _exceeded(self, keep: set[int], deadline: float) -> str:
        if time.monotonic() > deadline:
            return f"it took more than {self.seconds:g} s"
        running = _others(keep)
        if len(running) > self.processes:
            return f"it ran {len(running)} processes; {self.processes} are allowed"
        held = sum(_resident(process) for process in running)
        if held > self.memory:
            return f"it took {held / 2**30:.1f} GiB of memory; {self.memory / 2**30:g} are allowed"
        return ""


def sweep(keep: set[int]) -> None:
    """End all our descendants but these, and theirs."""
    deadline = time.monotonic() + 5.0
    while (others := _others(keep)) and time.monotonic() < deadline:
        for process in others:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(others, timeout=1.0)  # takes their status too, where they are our children


def _others(keep: set[int]) -> list[psutil.Process]:
    """Our descendants, without these and what is below them."""
    found: list[psutil.Process] = []
    below = [child for child in psutil.Process().children() if child.pid not in keep]
    while below:
        found += below
        children = []
        for process in below:
            with contextlib.suppress(psutil.Error):
                children += process.children()
        below = children
    return found


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def adopt_orphans() -> None:
    """From now on processes whose parent ends become our children, so that `sweep` finds them; on Linux."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)

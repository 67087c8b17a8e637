"""Run a command with a limit: stacks of all threads first, then SIGINT, on which pytest still names what failed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ended", "run", "say"]

TO_END = 60.0
"""Seconds that a program has after SIGINT, to print what it knows, before SIGKILL."""


@dataclass(frozen=True)
class Ended:
    """How a step ended: its exit status, its seconds, and whether its time was over."""

    name: str
    status: int
    seconds: float
    over: bool = False


def say(text: str) -> None:
    """Print a line of the gate's own."""
    print(f"ci: {text}", flush=True)


def run(
    name: str,
    command: Sequence[str],
    until: float,
    *,
    root: Path,
    out: Path,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command in a session of its own until it ends, or until the time `until` (of time.monotonic) is over.

    Args:
        root: the folder that it runs in.
        out: the folder of the records, in which processes of pytest have their files for stacks.
        log: where its output goes; None: to this program's.
    """
    began = time.monotonic()
    say(f"{name}: {' '.join(command)}")
    output = log.open("w", encoding="utf-8") if log else None
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT if output else None,
        cwd=root, env=environment, start_new_session=True,
    )  # fmt: skip
    over = False
    try:
        process.wait(max(until - began, 0.0))
    except subprocess.TimeoutExpired:
        over = True
        say(f"{name}: its time is over; the stacks of its threads:")
        _end(process, out)
    finally:
        if output:
            output.close()
        _kill_session(process.pid)
    ended = Ended(name, process.returncode, time.monotonic() - began, over)
    say(
        f"{name} {'passed' if ended.status == 0 else f'ended with {ended.status}'} after {ended.seconds:.0f} s"
    )
    return ended


def _end(process: subprocess.Popen[bytes], out: Path) -> None:
    for path in out.glob("*.stacks"):
        _signal(int(path.name.split(".")[-2]), signal.SIGUSR1)
    time.sleep(2.0)  # for faulthandler, which has no event to wait for
    for path in sorted(out.glob("*.stacks")):
        if text := path.read_text(encoding="utf-8"):
            sys.stdout.write(f"{path.name}\n{text}\n")
    _signal(process.pid, signal.SIGINT)
    try:
        process.wait(TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _kill_session(leader: int) -> None:
    """Kill what a step left running: whatever is still in the session that it began."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            _signal(int(stat.parent.name), signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

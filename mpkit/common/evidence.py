"""One piece of evidence: the text of a command or file, or the reason why there is none.

A command is what somebody's PATH says it is. So it gets as long and may print as much as the tool that it is taken for
could, and then it is killed, with all that it has started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["CommandOutput", "ask", "read"]

MOST = 1_000_000
"""The most bytes that are read from a command or file."""


@dataclass(frozen=True)
class CommandOutput:
    """What a command printed, or what a file holds.

    Attributes:
        source: the command or the path.
        text: its output; "" if there is none.
        missing: why there is none, such as "nvidia-smi is not installed"; "" if there is.
        failed: whether the command is there, and failed or did not answer.
    """

    source: str
    text: str = ""
    missing: str = ""
    failed: bool = False


def ask(command: Sequence[str], limit: float = 10.0) -> CommandOutput:
    """Run a command and return what it printed.

    Args:
        command: the program and its arguments.
        limit: seconds after which it is stopped and counts as not checked.
    """
    source = " ".join(command)
    if shutil.which(command[0]) is None:
        return CommandOutput(source, missing=f"{command[0]} is not installed")
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return CommandOutput(source, missing=f"`{source}` could not be run: {error.strerror}")
    printed = [_CommandOutput(process, pipe) for pipe in (process.stdout, process.stderr)]
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        return CommandOutput(source, missing=f"`{source}` did not answer within {limit:g} s", failed=True)
    finally:
        _kill(process)
        for each in printed:
            each.close(limit)
    if any(each.is_too_long for each in printed):
        return CommandOutput(source, missing=f"`{source}` printed more than {MOST:,} bytes")
    text, errors = (each.data.decode("utf-8", "replace") for each in printed)
    if process.returncode != 0:
        said = (text + errors).strip().splitlines()
        return CommandOutput(
            source,
            missing=f"`{source}` failed: {said[0] if said else f'exit {process.returncode}'}",
            failed=True,
        )
    return CommandOutput(source, text)


class _CommandOutput(threading.Thread):
    """Reads what a command prints, and kills it if that is too long."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        super().__init__(name="mpkit-ask", daemon=True)
        self.data, self._process, self._pipe = b"", process, pipe
        self.start()

    @property
    def is_too_long(self) -> bool:
        """Whether the command printed more than is read."""
        return len(self.data) > MOST

    def run(self) -> None:
        """Read until the end."""
        while not self.is_too_long and (piece := os.read(self._pipe.fileno(), 1 << 16)):
            self.data += piece
        if self.is_too_long:
            _kill(self._process)

    def close(self, limit: float) -> None:
        """End the reading; a process that has left the command's session may hold the pipe for longer than this."""
        self.join(limit)
        if not self.is_alive():
            self._pipe.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read(path: str) -> CommandOutput:
    """Return what a file holds, its first megabyte if it is longer."""
    try:
        with Path(path).open("rb") as file:
            return CommandOutput(path, file.read(MOST).decode("utf-8", "replace"))
    except OSError as error:
        return CommandOutput(path, missing=f"{path} cannot be read: {error.strerror}")

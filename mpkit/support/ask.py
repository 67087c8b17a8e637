"""One piece of evidence: the text of a command or file, or the reason why there is none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Answer", "ask", "read"]


@dataclass(frozen=True)
class Answer:
    """What a command printed, or what a file holds.

    Attributes:
        source: the command or the path.
        text: its output; "" if there is none.
        missing: why there is none, such as "nvidia-smi is not installed"; "" if there is.
    """

    source: str
    text: str = ""
    missing: str = ""


def ask(command: Sequence[str], limit: float = 10.0) -> Answer:
    """Run a command and return what it printed.

    Args:
        command: the program and its arguments.
        limit: seconds after which it is stopped and counts as not checked.
    """
    source = " ".join(command)
    if shutil.which(command[0]) is None:
        return Answer(source, missing=f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(source, missing=f"`{source}` did not answer within {limit:g} s")
    except OSError as error:
        return Answer(source, missing=f"`{source}` could not be run: {error.strerror}")
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        said = (text + done.stderr.decode("utf-8", "replace")).strip().splitlines()
        return Answer(source, missing=f"`{source}` failed: {said[0] if said else f'exit {done.returncode}'}")
    return Answer(source, text)


def read(path: str) -> Answer:
    """Return what a file holds."""
    try:
        return Answer(path, Path(path).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return Answer(path, missing=f"{path} cannot be read: {error.strerror}")

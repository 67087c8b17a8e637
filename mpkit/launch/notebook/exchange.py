"""Requests to the ranks of a session, and their answers: files in the launch's folder, and a pipe per rank.

request7.pkl       what is asked; all ranks that are asked read the same file
rank3.requests     a pipe: a line with the number of a request wakes the rank, which otherwise sleeps in a read
rank3.answer7      its answer, which appears whole
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpkit.common.disk import write_whole
from mpkit.common.launch_folder import part
from mpkit.strategies.packing.packing import dumps

__all__ = ["Reply", "Request", "Requests", "answer", "read_answer", "wake", "write_request"]


@dataclass
class Request:
    """What the ranks are asked to do.

    Attributes:
        do: "cell", "put", "get" or "complete".
        text: the cell's code, the name of a variable, or what is to be completed.
        name: what tracebacks call the cell.
        value: for "put": a pickled value.
    """

    do: str
    text: str = ""
    name: str = ""
    value: bytes = b""


@dataclass
class Reply:
    """What a rank answers.

    Attributes:
        state: "ok", "error" or "interrupted".
        shown: what a notebook displays for the value of the cell's last expression, by type; empty if it has none.
        value: for "get": the pickled value; for "complete": a list of completions.
        error: for an error: its type, message and traceback, and the traceback without the frames of libraries.
        calls: how many collective calls this rank has made among all ranks.
        ops, recorded: how many operations its trace had when the cell began, and how many the cell added.
    """

    state: str = "ok"
    shown: dict[str, str] = field(default_factory=dict)
    value: Any = None
    error: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    ops: int = 0
    recorded: int = 0


class Requests:
    """A rank's end of its pipe.

    Args:
        folder: the launch's folder.
        rank: the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        path = part(folder, rank, "requests")
        os.mkfifo(path, 0o600)
        self._pipe = os.open(path, os.O_RDWR)  # with a writer of its own, so that it never ends
        self._read = b""

    def wait_for_request(self) -> tuple[int, Request]:
        """Sleep until there is a request, and return its number and the request."""
        while b"\n" not in self._read:
            self._read += os.read(self._pipe, 4096)
        line, _, self._read = self._read.partition(b"\n")
        with (self._folder / f"request{int(line)}.pkl").open("rb") as file:
            request: Request = pickle.load(file)
        return int(line), request


def answer(folder: Path, rank: int, number: int, given: Reply) -> None:
    """Write a rank's answer."""
    write_whole(part(folder, rank, f"answer{number}"), dumps(given))


# ---- the notebook's half -------------------------------------------------------------------------------------


def write_request(folder: Path, number: int, request: Request) -> None:
    """Write a request, before ranks are woken for it."""
    write_whole(folder / f"request{number}.pkl", pickle.dumps(request))


def wake(folder: Path, rank: int, number: int) -> None:
    """Wake a rank for a request."""
    pipe = os.open(part(folder, rank, "requests"), os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(pipe, f"{number}\n".encode())
    finally:
        os.close(pipe)


def read_answer(folder: Path, rank: int, number: int) -> Reply | None:
    """Return a rank's answer and remove its file; None if there is none yet."""
    path = part(folder, rank, f"answer{number}")
    try:
        with path.open("rb") as file:
            given: Reply = pickle.load(file)
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return given

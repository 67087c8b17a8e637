"""The files of one launch: everything that ranks and parent tell each other goes through its folder.

settings.json    what every rank needs before it can unpickle: `Settings`
payload.pkl      (function, arguments), by value where they come from a notebook
output.log       what ranks printed, in the order in which they printed it: records of `OUTPUT`
rank3.std        what rank 3's C++ code and child processes wrote to file descriptors 1 and 2
rank3.result     what the function returned
rank3.error      how it failed: JSON
rank3.note       a line that output.log had no space for
store            where ranks find each other
rank3.stack      Python stacks, written on request
rank3.ask        a pipe that takes these requests
rank3.ops ...    its trace: see mpkit.trace
rank3.messages   fingerprints of its messages, and calls.* those of each group's collectives: mpkit.parallel.call_checks
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MAGIC = b"\xff\xfe\xff\xfd"
"""What a record of output begins with. No UTF-8 text contains it, so that a torn record is found."""

OUTPUT = struct.Struct("<4sIBI")
"""A piece of output: `MAGIC`, rank, stream (1 stdout, 2 stderr), length of the UTF-8 text that follows."""

OUTPUT_LIMIT = 10_000_000
"""Bytes a rank may print in one launch before the rest is dropped: `while True: print(...)` fills no disk."""

UNREPORTED = 71
"""Exit status of a rank that failed and could not even write why."""

RESERVED = {"error": 32768, "note": 1024}
"""Bytes on the disk that are set aside for each rank beforehand: what went wrong can be told on a full disk too."""


@dataclass(frozen=True)
class Settings:
    """What a rank is told before anything of the user's is loaded.

    Attributes:
        ranks: the world size.
        device: "cpu" or "cuda".
        backend: "gloo" or "nccl".
        devices: how many GPUs the ranks share (0 on CPUs).
        threads: torch's threads a rank.
        path, cwd, argv: sys.path, the current folder and sys.argv of the process that launched.
        sources: source lines of code that is in no file (notebook cells), for tracebacks.
        layers: record every layer, not only every action.
        environment: variables that have changed since the nursery was started; None: that are gone.
        compares: compare each communication with its peers' calls.
    """

    ranks: int
    device: str
    backend: str
    devices: int
    threads: int
    path: list[str]
    cwd: str
    argv: list[str]
    sources: dict[str, str]
    layers: bool = False
    environment: dict[str, str | None] = field(default_factory=dict)
    compares: bool = True

    def dumps(self) -> bytes:
        """Return the bytes of settings.json."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """What `write` wrote."""
        return cls(**json.loads((folder / "settings.json").read_text()))


def part(folder: Path, rank: int, what: str) -> Path:
    """The path of one rank's file, such as part(folder, 3, "result")."""
    return folder / f"rank{rank}.{what}"


def reserve(folder: Path, ranks: int) -> None:
    """Set aside the space of `RESERVED`; for the launching process, before ranks are started."""
    for rank in range(ranks):
        for what, size in RESERVED.items():
            with part(folder, rank, what).open("wb") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, size)
                except AttributeError:  # macOS has no such call
                    file.write(bytes(size))


def write_error(folder: Path, rank: int, error: dict[str, Any]) -> None:
    """Leave `rank3.error` behind; of a long one only its beginning and end where the disk is full.

    Raises:
        OSError: not even that could be written.
    """
    path, most = part(folder, rank, "error"), RESERVED["error"] // 8
    try:
        _overwrite(path, json.dumps(error))
    except OSError:
        short = {
            key: value
            if not isinstance(value, str) or len(value) < most
            else f"{value[:200]}...{value[-most:]}"
            for key, value in error.items()
        }
        _overwrite(path, json.dumps(short)[: RESERVED["error"]])


def read_error(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return what `write_error` wrote, or None."""
    try:
        return dict(json.loads(_written(part(folder, rank, "error"))))
    except ValueError:
        return None


def write_note(folder: Path, rank: int, text: str) -> None:
    """Leave a line for who launched this rank that output.log has no space for; the latest one stays."""
    with contextlib.suppress(OSError):
        _overwrite(part(folder, rank, "note"), text[: RESERVED["note"] // 4])


def read_note(folder: Path, rank: int) -> str:
    """Return what `write_note` wrote, or nothing."""
    return _written(part(folder, rank, "note"))


def _overwrite(path: Path, text: str) -> None:
    """Write over what is there, which takes no new space as far as that reaches."""
    file = os.open(path, os.O_WRONLY)
    try:
        data, place = text.encode("utf-8", "replace"), 0
        while place < len(data):
            place += os.pwrite(file, data[place:], place)
        os.ftruncate(file, len(data))
    finally:
        os.close(file)


def _written(path: Path) -> str:
    try:
        return path.read_bytes().rstrip(b"\0").decode("utf-8", "replace")
    except FileNotFoundError:
        return ""

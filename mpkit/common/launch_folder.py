"""The files of one launch. Ranks and parent exchange everything through its folder.

settings.json    what every rank needs before it can unpickle: `Settings`
payload.pkl      (function, arguments), by value where they come from a notebook
output.log       what ranks printed, each line with its rank, in the order in which they printed it
rank3.std        what rank 3's C++ code and child processes wrote to file descriptors 1 and 2
rank3.result     what the function returned
rank3.error      how it failed: JSON
rank3.note       a line that output.log had no space for
store            where ranks find each other
rank3.stack      Python stacks, written on request
rank3.ops ...    its trace: see mpkit.trace
launched         whether ranks that a launcher started all write here
difference       what a step has that serial training has not: JSON
calls.*          fingerprints of each group's collectives, and of messages: mpkit.strategies.comm.call_checks
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpkit.common.disk import NO_LINK, create, write_whole
from mpkit.errors import NotSerial

OUTPUT_LIMIT = 10_000_000
"""Bytes that a rank may print per launch; the rest is dropped, so that `while True: print(...)` fills no disk."""

UNREPORTED = 71
"""Exit status of a rank that failed and could not write its error."""

LAUNCHED, APART, TOGETHER = "launched", "apart", "together"
"""The file in the folder of ranks that a launcher started, and its content: whether all ranks write there."""

OWN = "mpkit-"
"""Prefix of TORCHELASTIC_RUN_ID in the ranks of a Cluster."""

DIFFERENCE = "difference"

RESERVED = {"error": 32768, "note": 1024}
"""Bytes reserved on the disk for each rank beforehand, so that errors can be reported even when the disk is full."""


@dataclass(frozen=True)
class Settings:
    """The settings that a rank reads before it loads any user code."""

    ranks: int  # the world size
    device: str  # "cpu", "cuda" or another kind of accelerator
    backend: str  # "gloo" or "nccl"
    threads: int  # torch's, per rank
    path: list[str]  # sys.path, current folder and sys.argv of the launching process
    cwd: str
    argv: list[str]
    sources: dict[str, str]  # source lines of code that is in no file (notebook cells), for tracebacks
    layers: bool = False  # record every layer, not only every action
    # Variables that have changed since the fork server started; None: removed.
    environment: dict[str, str | None] = field(default_factory=dict)
    compares: bool = True  # compare each communication with its peers' calls
    numbers: list[int] = field(default_factory=list)  # of devices: rank r is on numbers[r % len(numbers)]
    port: int = 0  # a free one on the loopback interface, for a program that opens a store of its own
    secret: str = ""  # signs the objects that ranks send each other; under a launcher the session's does
    logging: dict[str, Any] = field(default_factory=dict)  # levels and format, see `launch.process.payload`

    def dumps(self) -> bytes:
        """Return the bytes of settings.json."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Read the settings from the launch's folder."""
        return cls(**json.loads((folder / "settings.json").read_text()))


def part(folder: Path, rank: int, what: str) -> Path:
    """Return the path of one rank's file, such as "rank3.result"."""
    return folder / f"rank{rank}.{what}"


def reserve(folder: Path, ranks: int) -> None:
    """Reserve the disk space of `RESERVED`. The launching process calls this before it starts ranks."""
    for rank in range(ranks):
        for what, size in RESERVED.items():
            with os.fdopen(create(part(folder, rank, what)), "wb") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, size)
                except AttributeError:  # macOS does not have this call
                    file.write(bytes(size))


def write_error(folder: Path, rank: int, error: dict[str, Any]) -> None:
    """Write `rank3.error`; if the disk is full, only the beginning and end of long values."""
    path, most = part(folder, rank, "error"), RESERVED["error"] // 8
    try:
        _overwrite(path, json.dumps(error))
    except OSError:
        long = {key for key, value in error.items() if isinstance(value, str) and len(value) >= most}
        short = {key: f"{v[:200]}...{v[-most:]}" if key in long else v for key, v in error.items()}
        _overwrite(path, json.dumps(short)[: RESERVED["error"]])


def read_error(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return what `write_error` wrote, or None."""
    try:
        return dict(json.loads(_read_written(part(folder, rank, "error"))))
    except ValueError:
        return None


def write_difference(folder: Path, error: NotSerial) -> None:
    """Let the ranks know that a step is not that of serial training."""
    write_whole(folder / DIFFERENCE, json.dumps({"message": str(error), "step": error.step}).encode())


def read_difference(folder: Path) -> NotSerial | None:
    """Return what `write_difference` wrote, or None."""
    path = folder / DIFFERENCE
    return NotSerial(**json.loads(path.read_bytes())) if path.exists() else None


def write_note(folder: Path, rank: int, text: str) -> None:
    """Write a line for the launching process that output.log had no space for; the latest one stays."""
    with contextlib.suppress(OSError):
        _overwrite(part(folder, rank, "note"), text[: RESERVED["note"] // 4])


def read_note(folder: Path, rank: int) -> str:
    """Return what `write_note` wrote, or ""."""
    return _read_written(part(folder, rank, "note"))


def _overwrite(path: Path, text: str) -> None:
    """Overwrite a file, which takes no new disk space as long as the text fits."""
    file = os.open(path, os.O_WRONLY | NO_LINK)
    try:
        data, place = text.encode("utf-8", "replace"), 0
        while place < len(data):
            place += os.pwrite(file, data[place:], place)
        os.ftruncate(file, len(data))
    finally:
        os.close(file)


def _read_written(path: Path) -> str:
    try:
        return path.read_bytes().rstrip(b"\0").decode("utf-8", "replace")
    except FileNotFoundError:
        return ""

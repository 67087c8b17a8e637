"""The files of one launch: everything that ranks and parent tell each other goes through its folder.

settings.json    what every rank needs before it can unpickle: `Settings`
payload.pkl      (function, arguments), by value where they come from a notebook
output.log       what ranks printed, in the order in which they printed it: records of `OUTPUT`
rank3.std        what rank 3's C++ code and child processes wrote to file descriptors 1 and 2
rank3.result     what the function returned
rank3.error      how it failed: JSON
rank3.stack      Python stacks, written on request (SIGUSR1) while it hangs
rank3.ops ...    its trace: see mpkit.trace
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OUTPUT = struct.Struct("<IBI")
"""A piece of output: rank, stream (1 stdout, 2 stderr), length of the UTF-8 text that follows."""

OUTPUT_LIMIT = 10_000_000
"""Bytes a rank may print in one launch before the rest is dropped: `while True: print(...)` fills no disk."""


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

    def write(self, folder: Path) -> None:
        """Into the launch's folder."""
        (folder / "settings.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """What `write` wrote."""
        return cls(**json.loads((folder / "settings.json").read_text()))


def part(folder: Path, rank: int, what: str) -> Path:
    """The path of one rank's file, such as part(folder, 3, "result")."""
    return folder / f"rank{rank}.{what}"


def write_error(folder: Path, rank: int, error: dict[str, Any]) -> None:
    """Leave `rank3.error` behind, whole or not at all."""
    partial = part(folder, rank, "error.partial")
    partial.write_text(json.dumps(error))
    partial.replace(part(folder, rank, "error"))


def read_error(folder: Path, rank: int) -> dict[str, Any] | None:
    """What `write_error` wrote, or None."""
    try:
        return dict(json.loads(part(folder, rank, "error").read_text()))
    except (FileNotFoundError, ValueError):
        return None

"""Reading the files of a rank, whether complete, growing or truncated."""

from __future__ import annotations

import json
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.errors import TraceError
from mpkit.trace.records import HEADER, MAGIC, MEMORY, OP, SAMPLE, VALUE

__all__ = ["RankTrace", "mapped", "read_rank"]


@dataclass
class RankTrace:
    """One rank's part of a Trace.

    Attributes:
        ops: (n,) array of `OP`.
        memory: (m,) array of `MEMORY`.
        names: the strings that `ops` refers to.
        state: "running" (or, if the run is over, cut off while running), "finished" or "failed".
        values: (k,) array of `VALUE`: what `ctx.log` wrote; none in traces from before there was such a thing.
        samples: (s,) array of `SAMPLE`: utilisation, memory and link traffic of its GPU; none where none was sampled.
    """

    ops: npt.NDArray[Any]
    memory: npt.NDArray[Any]
    names: list[str]
    state: str = "finished"
    values: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, VALUE))
    samples: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, SAMPLE))

    def name(self, line: int) -> str:
        """Return the string with that number; "?" if the rank was killed before writing it."""
        return self.names[line] if 0 <= line < len(self.names) else "?"


def read_rank(folder: Path, number: int) -> RankTrace:
    """Read what rank `number` has recorded so far, as copies, so that the files may be deleted."""
    ops, state = _read_records(folder / f"rank{number}.ops", "ops", OP)
    while len(ops) and not ops[-1]["kind"]:  # counted, but not yet visible from the other core
        ops = ops[:-1]
    memory, _ = _read_records(folder / f"rank{number}.mem", "mem", MEMORY)
    values, _ = _read_records(folder / f"rank{number}.log", "log", VALUE)
    samples, _ = _read_records(folder / f"rank{number}.gpu", "gpu", SAMPLE)
    names = _read_names(folder / f"rank{number}.names")
    return RankTrace(ops, memory, names, ("running", "finished", "failed")[min(state, 2)], values, samples)


def mapped(path: Path) -> npt.NDArray[np.uint8]:
    """Return the bytes of a file that a rank is writing, without a copy; none if it is not there yet, or still empty.

    A rank that ends shortens its files to what they hold. If that happens between the look at the length and the
    mapping, which then fails, the length is looked at again.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        while length := os.fstat(file.fileno()).st_size:
            with suppress(ValueError):  # the file is shorter by now
                return np.frombuffer(mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ), np.uint8)
    return np.empty(0, np.uint8)


def _read_records(path: Path, part: str, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], int]:
    """Read the complete records of one file, and its state."""
    if not path.is_file():  # not there yet, or something that would block a reader
        return np.empty(0, dtype), 0
    data = mapped(path)
    if len(data) < HEADER.itemsize:
        return np.empty(0, dtype), 0
    head = data[: HEADER.itemsize].view(HEADER)[0]
    if not head["magic"]:  # just created
        return np.empty(0, dtype), 0
    if bytes(head["magic"]) != MAGIC[part]:
        raise TraceError(
            f"{path} is not a file of this version of mpkit: it begins with {bytes(head['magic'])!r}"
        )
    there = (len(data) - HEADER.itemsize) // dtype.itemsize
    count = min(int(head["count"]), there)
    body = data[HEADER.itemsize : HEADER.itemsize + count * dtype.itemsize]
    return np.array(body).view(dtype), int(head["state"])


def _read_names(path: Path) -> list[str]:
    names = []
    if path.is_file():
        for line in path.read_bytes().split(b"\n")[:-1]:  # a line without its newline is incomplete
            try:
                names.append(str(json.loads(line)))
            except (ValueError, RecursionError):
                names.append("?")
    return names or [""]

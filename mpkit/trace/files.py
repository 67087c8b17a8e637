"""Reading the files of a rank, whether complete, growing or truncated."""

import json
import mmap
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.common.arrays import Array
from mpkit.errors import TraceError
from mpkit.trace.records import HEADER, MAGIC, MEMORY, OP, SAMPLE, SENT_PART, VALUE


@dataclass
class RankTrace:
    """One rank's part of a Trace.

    Attributes:
        ops: (n,) array of `OP`.
        memory: (m,) array of `MEMORY`.
        names: the strings that `ops` refers to.
        state: "running" (or, if the run is over, cut off while running), "finished" or "failed".
        values: (k,) array of `VALUE`: what `ctx.log` wrote; none in older traces.
        samples: (s,) array of `SAMPLE`: utilisation and memory of its GPU, if they were sampled.
        sent_parts: (k,) array of `SENT_PART`: the parts of its uneven all-to-alls; none in older traces.
    """

    ops: Array
    memory: Array
    names: list[str]
    state: str = "finished"
    values: Array = field(default_factory=lambda: np.empty(0, VALUE))
    samples: Array = field(default_factory=lambda: np.empty(0, SAMPLE))
    sent_parts: Array = field(default_factory=lambda: np.empty(0, SENT_PART))

    def name(self, line: int) -> str:
        """Return the string with that number; "?" if the rank was killed before writing it."""
        return self.names[line] if 0 <= line < len(self.names) else "?"

    def sent_since(self, first: int) -> Array:
        """Return the parts of all-to-alls from an op on, with ops counted from that one."""
        later: Array = self.sent_parts[self.sent_parts["op"] >= first]
        later["op"] -= first
        return later


def read_rank(folder: Path, number: int) -> RankTrace:
    """Read what rank `number` has recorded so far, as copies, so that the files may be deleted.

    Raises:
        TraceError: a file is of another version, or a rank did not write it.
    """
    ops, state, check = _read_records(folder / f"rank{number}.ops", "ops", OP)
    # After the ops: a live replay would take an all-to-all whose parts it does not know for one of equal parts.
    sent, *_ = _read_records(folder / f"rank{number}.sent", "sent", SENT_PART)
    memory, *_ = _read_records(folder / f"rank{number}.mem", "mem", MEMORY)
    values, *_ = _read_records(folder / f"rank{number}.log", "log", VALUE)
    samples, *_ = _read_records(folder / f"rank{number}.gpu", "gpu", SAMPLE)
    names = _read_names(folder / f"rank{number}.names", check)
    ended = ("running", "finished", "failed")[min(state, 2)]
    return RankTrace(ops, memory, names, ended, values, samples, sent[sent["op"] < len(ops)])


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Return the bytes of a file that a rank is writing, without a copy; none if it is not there yet, or still empty.

    A rank that ends shortens its files. If that happens between reading the length and mapping the file, the mapping
    fails, and the length is read again.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        while length := os.fstat(file.fileno()).st_size:
            with suppress(ValueError):  # the file is shorter by now
                return np.frombuffer(mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ), np.uint8)
    return np.empty(0, np.uint8)


def _read_records(path: Path, part: str, dtype: np.dtype[Any]) -> tuple[Array, int, int]:
    """Read the complete records of one file, its state, and the check of the names."""
    nothing = np.empty(0, dtype), 0, 0
    if not path.is_file():  # not there yet, or something that blocks a reader
        return nothing
    try:
        return _read_once(path, part, dtype) or nothing
    except TraceError:  # the rank may have ended between the reader's look at the count and at the check
        return _read_once(path, part, dtype) or nothing


def _read_once(path: Path, part: str, dtype: np.dtype[Any]) -> tuple[Array, int, int] | None:
    data = map_file(path)
    if len(data) < HEADER.itemsize:
        return None
    # A copy: while the rank writes, records read before its check could still be without their ends.
    head = data[: HEADER.itemsize].copy().view(HEADER)[0]
    if not head["magic"]:  # just created
        return None
    if bytes(head["magic"]) != MAGIC[part]:
        magic = bytes(head["magic"])
        raise TraceError(f"{path} is not a file of this version of mpkit: it begins with {magic!r}")
    there = (len(data) - HEADER.itemsize) // dtype.itemsize
    count = min(int(head["count"]), there)
    body = np.array(data[HEADER.itemsize : HEADER.itemsize + count * dtype.itemsize])
    if count == head["count"]:  # of a file that was cut short, the whole records are read
        _check(path, body.data, int(head["check"]))
    return _whole_records(path, body.view(dtype)), int(head["state"]), int(head["names"])


def _check(path: Path, data: bytes | memoryview, check: int) -> None:
    if check and check % 2**32 != zlib.crc32(data):
        raise TraceError(f"{path} is damaged: its CRC-32 is not that of what the rank wrote")


def _whole_records(path: Path, records: Array) -> Array:
    """Return the records before an empty one, which is counted but not visible from this core or disk yet.

    If later ones are not empty, a page was lost.
    """
    if not len(records):
        return records
    if "kind" in (names := records.dtype.names or ()) and "lane" in names:
        empty = records["kind"] == 0
    else:
        empty = ~records.view(np.uint8).reshape(len(records), -1).any(axis=1)
    if not empty.any():
        return records
    first = int(empty.argmax())
    if not empty[first:].all():
        raise TraceError(f"{path} is damaged: record number {first:,} is empty, and later ones are not")
    return records[: max(first - 1, 0)]  # the one before may be incomplete


def _read_names(path: Path, check: int) -> list[str]:
    names = []
    if path.is_file():
        data = path.read_bytes()
        if len(data) >= check >> 32:
            _check(path, data, check)
        for line in data.split(b"\n")[:-1]:  # a line without its newline is incomplete
            try:
                names.append(str(json.loads(line)))
            except (ValueError, RecursionError):
                names.append("?")
    return names or [""]

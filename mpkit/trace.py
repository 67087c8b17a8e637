"""A Trace: what each rank of a run did, in program order.

A rank writes three files into the run's folder while it runs, and whoever wants to look reads them while
they grow. They are memory-mapped, so a rank killed by SIGKILL loses nothing that it recorded.

    rank3.ops     a HEADER, then one OP record an operation, in the order in which they began
    rank3.mem     a HEADER, then one MEMORY record a change of the bytes held
    rank3.names   one JSON string a line; the records name things by line number
    meta.json     about the run: world size, device, plan, ...

An op that has begun and not ended has `end == 0`. That is what a hang or a crash is read from.

This module meets both sides, the ranks that record and the views that draw, and so imports nothing of mpkit
but its exceptions.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.errors import TraceError

__all__ = ["CATEGORIES", "HEADER", "MEMORY", "OP", "Kind", "Lane", "RankTrace", "Trace", "lane_of"]

VERSION = 1


class Lane(IntEnum):
    """The lanes of one device: what can happen at the same time on it."""

    COMPUTE = 0
    COMM = 1
    HOST = 2
    NONE = 3  # markers, such as a step; never drawn as work


class Kind(IntEnum):
    """What an op is. The lower-case name is the word used in data frames and pictures."""

    # compute lane: the device is busy
    FORWARD = 1  # F
    BACKWARD = 2  # B
    INPUT_GRAD = 3  # I: the backward's half that the stage before waits for
    WEIGHT_GRAD = 4  # W: the other half
    OPTIMIZER = 5
    RECOMPUTE = 6
    COMPUTE = 7  # anything else that computes, such as a learner's own span
    # compute lane: the device is idle
    WAIT = 16  # until the op `ref` is finished
    # comm lane
    SEND = 32
    RECV = 33
    ALL_REDUCE = 34
    ALL_GATHER = 35
    REDUCE_SCATTER = 36
    BROADCAST = 37
    REDUCE = 38
    SCATTER = 39
    GATHER = 40
    ALL_TO_ALL = 41
    BARRIER = 42
    # host lane: copies between device and host
    COPY_TO_DEVICE = 64
    COPY_TO_HOST = 65
    # no lane
    STEP = 128  # one training step; `value` is its loss, on the ranks that know it

    @property
    def word(self) -> str:
        """The kind as data frames and pictures spell it, such as "all_reduce"."""
        return self.name.lower()


def lane_of(kind: int) -> Lane:
    """The lane on which an op of this kind runs.

    >>> lane_of(Kind.ALL_REDUCE).name
    'COMM'
    """
    if kind < 32:
        return Lane.COMPUTE
    if kind < 64:
        return Lane.COMM
    return Lane.HOST if kind < 128 else Lane.NONE


CATEGORIES = ("params", "grads", "optimizer", "activations", "buffers")
"""What memory is held for. A MEMORY record's `category` is an index into these."""

HEADER = np.dtype([("magic", "S8"), ("count", "<u8"), ("state", "<u8"), ("pad", "V40")])
"""64 bytes. `count`: the records that are whole. `state`: 0 running, 1 finished, 2 failed."""

OP = np.dtype(
    [
        ("kind", "u1"),
        ("lane", "u1"),
        ("depth", "u1"),  # 0: a whole action; 1 and more: a layer within it, not counted again
        ("flags", "u1"),  # reserved
        ("stage", "<i2"),  # -1: none
        ("pad", "<i2"),
        ("microbatch", "<i4"),  # -1: none
        ("step", "<i4"),  # -1: outside of any step
        ("name", "<u4"),  # line of rank*.names; line 0 is ""
        (
            "where",
            "<u4",
        ),  # line of rank*.names: "file.py:12 in function", of the code that asked for it
        (
            "group",
            "<u4",
        ),  # line of rank*.names: "0,1,2,3" for a collective, "0>1#tag" for a message
        (
            "number",
            "<i4",
        ),  # the n-th op of its group (or of its src, dst and tag), from 0; -1: none
        (
            "peer",
            "<i4",
        ),  # the other end of a message, or the root of a collective, as a global rank; -1
        ("ref", "<i4"),  # WAIT: index of the op waited for; -1
        (
            "start",
            "<i8",
        ),  # ns of the machine's monotonic clock; for communication: when it was issued
        (
            "end",
            "<i8",
        ),  # 0 while the op is open; for communication: when it was seen to be complete
        ("cpu", "<i8"),  # ns of CPU time that the rank's thread used between start and end
        (
            "bytes",
            "<i8",
        ),  # payload of a communication or copy; bytes touched by a compute op, 0 if unknown
        ("flops", "<f8"),  # of a compute op, 0 if unknown
        ("value", "<f8"),  # STEP: the loss, nan if unknown
    ]
)

MEMORY = np.dtype(
    [
        ("time", "<i8"),  # ns, as in OP
        ("op", "<u4"),  # ops begun on this rank before the change: it happened in or after op - 1
        ("category", "u1"),
        ("pad", "V3"),
        ("delta", "<i8"),  # bytes
    ]
)

MAGIC = {"ops": b"MPKOPS01", "mem": b"MPKMEM01"}


@dataclass
class RankTrace:
    """One rank's part of a Trace.

    Attributes:
        ops: (n,) array of `OP`.
        memory: (m,) array of `MEMORY`.
        names: the strings that `ops` refers to.
        state: "running" (cut off there, if the run is over), "finished" or "failed".
    """

    ops: npt.NDArray[Any]
    memory: npt.NDArray[Any]
    names: list[str]
    state: str = "finished"

    def name(self, line: int) -> str:
        """The string of that number; "?" where the rank was killed before it wrote it."""
        return self.names[line] if 0 <= line < len(self.names) else "?"


@dataclass
class Trace:
    """What each rank of a run did, in program order. See `Trace.save`, `Trace.load`, `mpkit.Timeline`.

    Attributes:
        ranks: one `RankTrace` a rank.
        meta: about the run, of JSON types: "world_size", "device" ("cpu" or "cuda"), "plan", "hardware", ...
    """

    ranks: list[RankTrace]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def losses(self) -> list[float]:
        """The loss of every step, as the first rank that knows it has it; nan for a step of unknown loss.

        A step under way counts once its loss is known.
        """
        found: dict[int, float] = {}
        for rank in self.ranks:
            steps = rank.ops[rank.ops["kind"] == Kind.STEP]
            for step in steps[(steps["end"] > 0) | ~np.isnan(steps["value"])]:
                if np.isnan(found.get(int(step["step"]), np.nan)):
                    found[int(step["step"])] = float(step["value"])
        return [found.get(step, np.nan) for step in range(1 + max(found, default=-1))]

    def __len__(self) -> int:
        return sum(len(rank.ops) for rank in self.ranks)

    def __repr__(self) -> str:
        steps = 1 + max((int(r.ops["step"].max()) for r in self.ranks if len(r.ops)), default=-1)
        return f"<Trace of {self.world_size} ranks, {len(self):,} ops, {steps} steps>"

    def save(self, path: str | Path) -> Path:
        """Write everything into one file (a zip of .npy arrays and JSON, no pickle); returns its path."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            head = {"version": VERSION, "ranks": self.world_size, "meta": self.meta}
            archive.writestr("mpkit.json", json.dumps(head))
            for number, rank in enumerate(self.ranks):
                for part, array in (("ops", rank.ops), ("mem", rank.memory)):
                    with archive.open(f"rank{number}.{part}.npy", "w") as file:
                        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
                archive.writestr(f"rank{number}.json", json.dumps({"names": rank.names, "state": rank.state}))
        partial.replace(path)  # a reader finds the old file or the whole new one
        return path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote, or the folder of a run, whole or not.

        Raises:
            TraceError: the file is none of ours, of a later version, or broken.
        """
        path = Path(path)
        if path.is_dir():
            return cls.read(path)
        try:
            with zipfile.ZipFile(path) as archive:
                head = json.loads(archive.read("mpkit.json"))
                if head["version"] > VERSION:
                    raise TraceError(
                        f"{path} was written by a later mpkit (format {head['version']}, this one reads up "
                        f"to {VERSION}): pip install --upgrade mpkit"
                    )
                ranks = [_rank_of(archive, number) for number in range(head["ranks"])]
        except FileNotFoundError:
            raise TraceError(f"{path}: no such file; run.trace.save({str(path)!r}) writes one") from None
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"{path} cannot be read as a trace ({type(error).__name__}: {error}). It is not a file that "
                "Trace.save wrote, or it was cut short or damaged. "
                "(A run's own folder loads as far as it is whole.)"
            ) from error
        return cls(ranks, head["meta"])

    @classmethod
    def read(cls, folder: str | Path) -> Trace:
        """The folder of a run, as far as it is written: of a cut file, the records that are whole."""
        folder = Path(folder)
        meta = _read_json(folder / "meta.json")
        numbers = sorted(int(p.name[4:-4]) for p in folder.glob("rank*.ops") if p.name[4:-4].isdigit())
        size = max([int(meta.get("world_size", 0)), *(n + 1 for n in numbers)], default=0)
        if not size:
            raise TraceError(f"{folder} is not the folder of a run: it holds no meta.json and no rank0.ops")
        return cls([read_rank(folder, number) for number in range(size)], meta)


def read_rank(folder: Path, number: int) -> RankTrace:
    """What rank `number` has recorded so far; copies, so that the files may go."""
    ops, state = _read_records(folder / f"rank{number}.ops", "ops", OP)
    while len(ops) and not ops[-1]["kind"]:  # counted, but on its way still from another core
        ops = ops[:-1]
    memory, _ = _read_records(folder / f"rank{number}.mem", "mem", MEMORY)
    names = _read_names(folder / f"rank{number}.names")
    return RankTrace(ops, memory, names, ("running", "finished", "failed")[min(state, 2)])


def _read_records(path: Path, part: str, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], int]:
    """The whole records of one file and its state."""
    try:
        data = np.memmap(path, mode="r")
    except (FileNotFoundError, ValueError):  # not there yet, or still empty
        return np.empty(0, dtype), 0
    if len(data) < HEADER.itemsize:
        return np.empty(0, dtype), 0
    head = data[: HEADER.itemsize].view(HEADER)[0]
    if not head["magic"]:  # only just made
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
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:  # a line without its end is not whole
            try:
                names.append(str(json.loads(line)))
            except ValueError:
                names.append("?")
    return names or [""]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return dict(found) if isinstance(found, Mapping) else {}


def _rank_of(archive: zipfile.ZipFile, number: int) -> RankTrace:
    head = json.loads(archive.read(f"rank{number}.json"))
    arrays = []
    for part, dtype in (("ops", OP), ("mem", MEMORY)):
        with archive.open(f"rank{number}.{part}.npy") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        if array.dtype != dtype or array.ndim != 1:
            raise TraceError(f"rank {number}'s {part} have other columns than this version of mpkit knows")
        arrays.append(array)
    return RankTrace(arrays[0], arrays[1], [str(name) for name in head["names"]], head["state"])

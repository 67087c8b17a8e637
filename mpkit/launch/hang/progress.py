"""Observing ranks from outside while they run, by reading their newest records from the memory-mapped files."""

from __future__ import annotations

import mmap
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.common.launch_folder import part
from mpkit.trace import HEADER, OP, Kind

__all__ = ["FINISHED", "RankWatch", "Sight"]

FINISHED = 1
"""The state of a rank that has finished."""


@dataclass(frozen=True)
class Sight:
    """A rank's state at one moment.

    Attributes:
        count: the number of ops begun so far.
        state: 0 running, 1 finished, 2 failed.
        waiting: the newest op is a WAIT that has not ended.
        end: the end of the newest op; `count` or `end` changes whenever the rank makes progress.
        started: the rank has met the others and records; before, it is starting, however long that takes.
    """

    count: int = 0
    state: int = 0
    waiting: bool = False
    end: int = 0
    started: bool = True


class RankWatch:
    """Watches all ranks of a launch. It maps each file once, and each look reads two records of it.

    Args:
        folder: the launch's folder.
        ranks: the number of ranks.
        local: those that write there, under a launcher on several nodes; the others pass for finished.
    """

    def __init__(self, folder: Path, ranks: int, local: Collection[int] | None = None) -> None:
        self._folder = folder
        self._local = range(ranks) if local is None else local
        self._maps: list[mmap.mmap | None] = [None] * ranks

    def _map(self, rank: int, anew: bool = False) -> mmap.mmap | None:
        if self._maps[rank] is None or anew:
            try:
                with part(self._folder, rank, "ops").open("rb") as file:
                    self._maps[rank] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (FileNotFoundError, ValueError):  # it does not exist yet, or is still empty
                return None
        return self._maps[rank]

    def look(self, rank: int) -> Sight:
        """Return the present state of one rank."""
        if rank not in self._local:  # nothing is known of it, and nobody here decides about it
            return Sight(state=FINISHED)
        data = self._map(rank)
        if data is None or len(data) < HEADER.itemsize:
            return Sight(started=False)
        head = np.frombuffer(data, HEADER, 1)[0]
        count = int(head["count"])
        if count == 0:
            return Sight(state=int(head["state"]))
        place = HEADER.itemsize + (count - 1) * OP.itemsize
        if place + OP.itemsize > len(data):  # the file has grown since it was mapped
            data = self._map(rank, anew=True)
            if data is None or place + OP.itemsize > len(data):
                return Sight(count=count)
        last: Any = np.frombuffer(data, OP, 1, place)[0]
        # Plain ints: when comparing a numpy scalar with an enum, numpy swallows a Ctrl-C that arrives meanwhile.
        kind, end = int(last["kind"]), int(last["end"])
        return Sight(count, int(head["state"]), kind == Kind.WAIT and end == 0, end)

    def look_at_all(self) -> tuple[Sight, ...]:
        """Return the present state of every rank."""
        return tuple(self.look(rank) for rank in range(len(self._maps)))

    def close(self) -> None:
        """Release all files, once the ranks have exited."""
        self._maps = [None] * len(self._maps)

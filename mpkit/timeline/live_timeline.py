"""The records of a run in progress, read as they grow and replayed immediately.

    files that grow -> what is new since the last look -> Replay -> spans that are new

So a live picture uses the same clock, and each update costs as much as its new records, not as all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.replay import Replay
from mpkit.timeline.timeline import Timeline
from mpkit.trace import HEADER, MEMORY, OP, SAMPLE, SENT_PART, RankTrace

__all__ = ["LiveFeed"]


class LiveFeed:
    """The new spans of a run, on request.

    Args:
        folder: the folder of the run.
        ranks: the number of ranks.
        meta: the meta of the trace, which says what the run trains and on which machine.
    """

    def __init__(self, folder: Path, ranks: int, meta: dict[str, Any]) -> None:
        self._folder = folder
        self._replay = Replay(ranks, meta=meta)
        self._names: list[list[str]] = [[] for _ in range(ranks)]
        self._name_ends = [0] * ranks  # bytes of each names file that were read
        self._taken: Counter[str] = Counter()  # records of each file that were read
        self._sampled = "sampled_gpus" in meta

    @property
    def names(self) -> list[str]:
        """The strings that the spans refer to; the list grows."""
        return self._replay.names

    def advance(self) -> npt.NDArray[Any]:
        """Return the spans, (n,) of `SPAN`, that follow from what was recorded since the last call."""
        for rank in range(len(self._names)):
            first = self._replay.wants(rank)
            # Read ops before names: an op's names are written before the op.
            ops = _records(self._folder / f"rank{rank}.ops", OP, first)
            memory, parts = self._new(f"rank{rank}.mem", MEMORY), self._new(f"rank{rank}.sent", SENT_PART)
            samples = self._new(f"rank{rank}.gpu", SAMPLE) if self._sampled else np.zeros(0, SAMPLE)
            self._read_names(rank)
            new = RankTrace(ops, memory, self._names[rank], samples=samples, sent_parts=parts)
            self._replay.feed(rank, new, first)
        return self._replay.advance()

    def timeline(self) -> Timeline:
        """Return the timeline of everything so far."""
        return Timeline.from_replay(self._replay.collect())

    def _new(self, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the records of a file since the last call."""
        records = _records(self._folder / name, dtype, self._taken[name])
        self._taken[name] += len(records)
        return records

    def _read_names(self, rank: int) -> None:
        path = self._folder / f"rank{rank}.names"
        try:
            with path.open("rb") as file:
                file.seek(self._name_ends[rank])
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._name_ends[rank] += len(whole)
        self._names[rank] += [str(json.loads(line)) for line in whole.splitlines()]


def _records(path: Path, dtype: np.dtype[Any], first: int) -> npt.NDArray[Any]:
    """Return the complete records from number `first` on; they are copied, since the file goes on changing."""
    try:
        with path.open("rb") as file:
            head = np.frombuffer(file.read(HEADER.itemsize), HEADER)
            if not len(head):
                return np.zeros(0, dtype)
            file.seek(HEADER.itemsize + first * dtype.itemsize)
            data = file.read(max(0, int(head[0]["count"]) - first) * dtype.itemsize)
    except (FileNotFoundError, ValueError):
        return np.zeros(0, dtype)
    return np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)

"""The records of a run in progress, read as they grow and replayed immediately.

    files that grow -> `Replay`, which takes what is new -> spans that are new

So a live picture uses the same clock, and is replayed only as far as its records are new.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt

from mpkit.timeline.replay import Replay
from mpkit.timeline.timeline import Timeline
from mpkit.trace import read_rank


class LiveFeed:
    """The new spans of a run, on request.

    Args:
        folder: the folder of the run.
        ranks: the number of ranks.
        meta: the meta of the trace, which says what the run trains and on which machine.
    """

    def __init__(self, folder: Path, ranks: int, meta: dict[str, Any]) -> None:
        self._folder, self._ranks = folder, ranks
        self._replay = Replay(ranks, meta=meta)

    @property
    def names(self) -> list[str]:
        """The strings that the spans refer to; the list grows."""
        return self._replay.names

    def advance(self) -> npt.NDArray[Any]:
        """Return the spans, (n,) of `SPAN`, that follow from what was recorded since the last call."""
        for rank in range(self._ranks) if self._folder.is_dir() else ():  # it goes when the run is over
            self._replay.feed(rank, read_rank(self._folder, rank))
        return self._replay.advance()

    def timeline(self) -> Timeline:
        """Return the timeline of everything so far."""
        return Timeline.from_replay(self._replay.collect())

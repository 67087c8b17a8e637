"""The bubble, counted as operations arrive.

A Timeline's own `bubble` reads all its spans; a live view receives a batch every tenth of a second and keeps sums.
Both compute GPipe's bubble (Huang et al. 2019): the idle share of the time between a step's first start and last end,
averaged over ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline import metrics
from mpkit.trace import Kind

__all__ = ["BubbleCounter"]


class BubbleCounter:
    """Sums by step: the first start, the last end, and each rank's busy time.

    >>> from mpkit.timeline.replay.spans import SPAN
    >>> counter = BubbleCounter(world_size=2)
    >>> one = np.zeros(1, SPAN)
    >>> one["kind"], one["end"] = 1, 1.0
    >>> counter.add(one)
    [0]
    >>> counter.bubble()                    # rank 1 has done nothing yet
    0.5
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.extents: dict[int, tuple[float, float]] = {}
        self._busy: dict[int, npt.NDArray[Any]] = {}
        self._marks: dict[int, int] = {}  # by step, the number of ranks that finished it

    def add(self, spans: npt.NDArray[Any]) -> list[int]:
        """Add a batch; returns the steps that it changed."""
        for step in spans["step"][spans["kind"] == Kind.STEP].tolist():
            self._marks[step] = self._marks.get(step, 0) + 1
        done = metrics.active(spans)
        changed: list[int] = np.unique(done["step"]).tolist()
        for step in changed:
            mine = done[done["step"] == step] if len(changed) > 1 else done
            sums = metrics.busy(spans[spans["step"] == step], self.world_size)
            self._busy[step] = self._busy.get(step, 0.0) + sums
            start, end = self.extents.get(step, (np.inf, -np.inf))
            self.extents[step] = (
                min(start, float(mine["start"].min())),
                max(end, float(mine["end"].max())),
            )
        return changed

    @property
    def complete(self) -> int | None:
        """The last step that every rank finished; None before there is one."""
        whole = [step for step, ranks in self._marks.items() if ranks >= self.world_size]
        return max(whole, default=None)

    def bubble(self, step: int | None = None) -> float | None:
        """Return the idle share so far of a step, by default the last; None before there is any."""
        shares = self.idle_shares(step)
        return sum(shares) / len(shares) if shares else None

    def idle_shares(self, step: int | None = None) -> list[float]:
        """Return the idle share of each rank so far in a step, by default the last."""
        step = self._latest() if step is None else step
        if step is None:
            return []
        start, end = self.extents[step]
        busy = self._busy[step] / (end - start) if end > start else np.ones(self.world_size)
        return [1.0 - float(share) for share in busy]

    def step_time(self, step: int | None = None) -> float | None:
        """Return the seconds of a step so far, by default the last."""
        step = self._latest() if step is None else step
        if step is None:
            return None
        start, end = self.extents[step]
        return end - start

    def _latest(self) -> int | None:
        """Return the last step in which a rank has worked; None before there is one."""
        return max((step for step, busy in self._busy.items() if busy.any()), default=None)

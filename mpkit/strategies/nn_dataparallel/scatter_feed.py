"""ScatterFeed: the batches of DP, where rank 0 holds the data and scatters it.

Every rank's share is the one that `mpkit.strategies.job.feed` would give it. torch.nn.DataParallel scatters blocks
instead of every n-th sample, which makes no difference to a mean over the batch. The other ranks read their own share
as well, for its shapes and for `Run.data_digest`, but compute on what rank 0 sends.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpkit.strategies.data.microbatch import Value, share, split
from mpkit.strategies.job.feed import Feed, MicroBatch

if TYPE_CHECKING:
    from mpkit.strategies.job.job import TrainJob
    from mpkit.strategies.rank_context import Context

__all__ = ["ScatterFeed", "ScatteredMicroBatch"]


@dataclass
class ScatteredMicroBatch(MicroBatch):
    """A rank's share of a micro-batch, and on rank 0 every rank's.

    Attributes:
        rows: number of samples per rank; 0 for some if there are fewer samples than ranks.
        keys: the signature of each rank's share.
        by_rank: (inputs, targets) of every rank that gets samples, on rank 0; empty on the others.
        whole: the whole micro-batch's weight in the batch.
    """

    rows: list[int]
    keys: list[Hashable]
    by_rank: list[tuple[Value, Value]]
    whole: float


class ScatterFeed(Feed):
    """Provides rank 0 with the micro-batches of a step, and the other ranks with their shapes.

    Args:
        context: this rank's context.
        job: read for batches and plan.
        accounts: as in `Feed`.
    """

    def __init__(self, context: Context, job: TrainJob, *, accounts: bool = True) -> None:
        super().__init__(context, job, needed=True, accounts=accounts)
        self._rank = context.rank

    def _wanted_parts(self, step: int) -> list[slice]:
        """Return this rank's parts of a step's batch; on rank 0 every rank's."""
        if self._rank:
            return super()._wanted_parts(step)
        size = self._source.size(step)
        cut = split(size, min(self._m, size))
        return [
            share(start, end, r, self._n) for start, end in cut for r in range(self._n) if start + r < end
        ]

    def take(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, each a `ScatteredMicroBatch`."""
        size = self._source.size(step)
        microbatches: list[MicroBatch] = []
        for own, (start, end) in zip(super().take(step), split(size, min(self._m, size)), strict=True):
            which = [share(start, end, rank, self._n) for rank in range(self._n)]
            rows = [len(range(size)[part]) if start + r < end else 0 for r, part in enumerate(which)]
            keys = [self._source.key(step, part) for part in which]
            by_rank = []
            if self._rank == 0:
                others = [(part, key) for part, key, k in zip(which, keys, rows, strict=True) if k][1:]
                by_rank = [
                    (own.inputs, own.targets),
                    *(self._load(step, part, key)[:2] for part, key in others),
                ]
            whole = (end - start) / size
            microbatches.append(
                ScatteredMicroBatch(own.inputs, own.targets, own.key, own.weight, rows, keys, by_rank, whole)
            )
        return microbatches

"""Deal: the batches of DP, where rank 0 has the data and deals it out.

Every rank's share is the one that `mpkit.parallel.feed` would give it: torch.nn.DataParallel deals out blocks and not
every n-th sample, which a mean over the batch cannot tell apart. The others look at their own share as well, for its
shapes and for `Run.data_digest`; what they compute on is what rank 0 sends.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpkit.parallel.feed import Feed, MicroBatch
from mpkit.parallel.microbatch import Value, share, split

if TYPE_CHECKING:
    from mpkit.launch.context import Context
    from mpkit.parallel.job import TrainJob

__all__ = ["Deal", "Dealt"]


@dataclass
class Dealt(MicroBatch):
    """A rank's share of a micro-batch, and on rank 0 everybody's.

    Attributes:
        rows: how many samples each rank gets; 0 if there are fewer samples than ranks.
        keys: the signature of each rank's share.
        dealt: (inputs, targets) of every rank that gets samples, on rank 0; empty on the others.
        whole: the micro-batch's share of the batch.
    """

    rows: list[int]
    keys: list[Hashable]
    dealt: list[tuple[Value, Value]]
    whole: float


class Deal(Feed):
    """Gives rank 0 the micro-batches of a step, and the others what they have to know of them.

    Args:
        context: of this rank.
        job: its batches and plan.
    """

    def __init__(self, context: Context, job: TrainJob) -> None:
        super().__init__(context, job, needed=True)
        self._rank = context.rank

    def _wanted(self, step: int) -> list[slice]:
        """This rank's parts of a step's batch; on rank 0 everybody's."""
        if self._rank:
            return super()._wanted(step)
        cut = split(self._source.size(step), self._m)
        return [
            share(start, end, r, self._n) for start, end in cut for r in range(self._n) if start + r < end
        ]

    def take(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, each a `Dealt`."""
        size = self._source.size(step)
        found: list[MicroBatch] = []
        for own, (start, end) in zip(super().take(step), split(size, self._m), strict=True):
            which = [share(start, end, rank, self._n) for rank in range(self._n)]
            rows = [len(range(size)[part]) if start + r < end else 0 for r, part in enumerate(which)]
            keys = [self._source.key(step, part) for part in which]
            dealt = []
            if self._rank == 0:
                others = [(part, key) for part, key, k in zip(which, keys, rows, strict=True) if k][1:]
                dealt = [(own.inputs, own.targets), *(self._load(step, part, key) for part, key in others)]
            whole = (end - start) / size
            found.append(Dealt(own.inputs, own.targets, own.key, own.weight, rows, keys, dealt, whole))
        return found

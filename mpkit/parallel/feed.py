"""Feed: this rank's share of each step's batch, in micro-batches.

    split     the batch into micro-batches, and each among the replicas
    load      the share: of the ranks of a pipeline those take it that hold the first or the last stage
    cut       its sequences, where ranks share those (context parallelism)
    account   digests of what was taken, for `Run.data_digest`

A micro-batch of k samples out of the batch's K weighs k/K in the loss, so nothing has to be of one size; where ranks
share its sequences equally, each counts as much.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from torch._subclasses.fake_tensor import FakeTensor

from mpkit.errors import MpkitError
from mpkit.parallel.context.sequence import sequence_part
from mpkit.parallel.digest import Taken
from mpkit.parallel.microbatch import Value, batch_size, leaves, part, share, signature, split

if TYPE_CHECKING:
    from mpkit.launch.context import Context
    from mpkit.parallel.job import TrainJob

__all__ = ["Feed", "MicroBatch", "Source", "WholeBatches"]


class Source(Protocol):
    """Where batches come from; `mpkit.Batches` is one too."""

    def __len__(self) -> int:
        """How many batches there are before they repeat, in whatever order."""

    def size(self, step: int) -> int:
        """How many samples the batch of a step has."""

    def part(self, step: int, which: slice) -> tuple[Value, Value]:
        """Some samples of the batch of a step."""

    def key(self, step: int, which: slice) -> Hashable:
        """The signature of such a part."""


class WholeBatches(list[tuple[Value, Value]]):
    """Batches that are there: step i takes number i % len."""

    def size(self, step: int) -> int:
        """How many samples the batch of a step has."""
        return batch_size(self[step % len(self)][0])

    def part(self, step: int, which: slice) -> tuple[Value, Value]:
        """Some samples of the batch of a step; views, not copies."""
        inputs, targets = self[step % len(self)]
        return part(inputs, which), part(targets, which)

    def key(self, step: int, which: slice) -> Hashable:
        """The signature of such a part."""
        return signature(*self.part(step, which))


@dataclass
class MicroBatch:
    """A rank's share of a part of the batch, on the CPU.

    Attributes:
        inputs, targets: empty tuples on a rank that needs neither.
        key: their signature.
        weight: the share of the batch that they are; 0 of a stand-in, which a rank without samples takes.
    """

    inputs: Value
    targets: Value
    key: Hashable
    weight: float


class Feed:
    """Gives one rank its micro-batches, step by step.

    Args:
        context: of this rank.
        job: its batches and plan.
        needed: whether this rank needs inputs or targets; if not, it is only told their shapes.
    """

    def __init__(self, context: Context, job: TrainJob, *, needed: bool) -> None:
        self._source: Source = job.batches
        self._known = job.numbers
        self._m, self._n = job.plan.microbatches, job.plan.dp
        place = job.plan.mesh.place(context.rank)
        self._place = place.dp
        self._cut = partial(sequence_part, index=place.cp, n=job.plan.cp, order=job.plan.cp_order)
        self._parts = job.plan.cp
        self._needed = needed
        self._taken = Taken(context.record.folder, context.rank)

    def take(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step."""
        size = self._source.size(step)
        found = []
        for start, end in split(size, self._m):
            # ---- split
            which = share(start, end, self._place, self._n)
            k = len(range(size)[which]) if start + self._place < end else 0
            # ---- load
            key = self._source.key(step, which)
            inputs, targets = self._load(step, which, key) if self._needed else ((), ())
            found.append(MicroBatch(inputs, targets, key, k / size / self._parts))
        # ---- account
        taken = [(mb.inputs, mb.targets) for mb in found if mb.weight and self._needed]
        if not any(isinstance(t, FakeTensor) for x, y in taken[:1] for t in (*leaves(x), *leaves(y))):
            self._taken.write(step, taken)
        return found

    def _load(self, step: int, which: slice, key: Hashable) -> tuple[Value, Value]:
        inputs, targets = self._source.part(step, which)
        found = signature(inputs, targets)
        if found != key or found not in self._known:
            raise MpkitError(
                f"The samples of step {step} have other shapes than the dataset's first one: {_shapes(found)} and not "
                f"{_shapes(key)}, so nobody knows what the layers make of them. All samples of a dataset need the same "
                "shapes: pad or cut them in its __getitem__. Batches of several shapes can be data itself, as a list."
            )
        # ---- cut
        return self._cut(inputs), self._cut(targets)


def _shapes(key: Hashable) -> str:
    assert isinstance(key, tuple)
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for _, shape, dtype in key)

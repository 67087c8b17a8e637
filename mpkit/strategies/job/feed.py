"""Feed: this rank's share of each step's batch, in micro-batches.

    split     divide the batch into micro-batches, and each of these among the replicas
    load      read the share, here or ahead of time in worker processes; in a pipeline, only ranks with the first or
              the last stage do. The time that the rank waits for it is an op of its own kind
    cut       cut its sequences, where ranks share those (context parallelism)
    account   record digests of what was taken, for `Run.data_digest`

A micro-batch of k samples out of the batch's K has weight k/K in the loss, so sizes may differ. Ranks that share its
sequences do so equally, and each has an equal part of that weight.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from mpkit.common.torch_private import FakeTensor
from mpkit.errors import MpkitError
from mpkit.strategies.context.sequence import check_not_packed, sequence_part
from mpkit.strategies.data.batches import Batches
from mpkit.strategies.data.digest import SampleLog
from mpkit.strategies.data.microbatch import Value, batch_size, leaves, part, share, signature, split
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.job.job import TrainJob
    from mpkit.strategies.rank_context import Context


class WholeBatches(list[tuple[Value, Value]]):
    """Batches in memory: step i takes number i % len. A feed can ask it whatever it asks `mk.Batches`."""

    loads = False  # a part need not be read
    num_workers = 0  # processes that read on each rank; 0 if the rank itself reads
    read_in = 0.0  # seconds that a loader took to read them before the start; 0 for a list

    def size(self, step: int) -> int:
        """Return how many samples the batch of a step has."""
        return batch_size(self[step % len(self)][0])

    def part(self, step: int, which: slice) -> tuple[Value, Value]:
        """Return some samples of a step's batch, as views."""
        inputs, targets = self[step % len(self)]
        return part(inputs, which), part(targets, which)

    def key(self, step: int, which: slice) -> Hashable:
        """Return the signature of such a part."""
        return signature(*self.part(step, which))


@dataclass
class MicroBatch:
    """A rank's share of a part of the batch, on the CPU."""

    inputs: Value  # inputs and targets are empty tuples on a rank that needs neither
    targets: Value
    key: Hashable  # their signature
    weight: float  # their share of the batch; 0 for a stand-in, which a rank without samples takes
    samples: int = field(default=0, kw_only=True)  # those that all replicas have of this micro-batch


class Feed:
    """This rank's source of micro-batches, step by step.

    Args:
        needed: whether this rank needs inputs or targets; if not, it only receives their shapes.
        accounts: whether digests are recorded of what is taken.
    """

    def __init__(self, context: Context, job: TrainJob, *, needed: bool, accounts: bool = True) -> None:
        self._source = job.what.batches
        self._known = job.where.numbers
        self._m, self._n = job.plan.microbatches, job.plan.dp
        place = job.plan.mesh.place(context.rank)
        self._place = place.dp
        self._plan, self._cp, self._parts = job.plan, place.cp, job.plan.cp
        self._needed = needed
        self._parts_of_step: Parts = {}
        self._taken = SampleLog(context.record.folder, context.rank) if accounts else None
        self._order, self._record = range(job.how.first_step, job.how.steps), context.record
        self._steps = _Steps(self._source, self._wanted_parts)
        self._read: Iterator[Parts] | None = None  # by workers

    def take(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step."""
        # ---- load
        self._parts_of_step = self._load_parts(step) if self._needed else {}
        # ---- split
        size = self._source.size(step)
        microbatches = []
        for start, end in split(size, min(self._m, size)):
            which = share(start, end, self._place, self._n)
            k = len(range(size)[which]) if start + self._place < end else 0
            key = self._source.key(step, which)
            inputs, targets = self._load(step, which, key) if self._needed else ((), ())
            weight = k / size / self._parts
            microbatches.append(MicroBatch(inputs, targets, key, weight, samples=end - start))
        # ---- account
        taken = [(mb.inputs, mb.targets) for mb in microbatches if mb.weight and self._needed]
        fake = any(isinstance(t, FakeTensor) for x, y in taken[:1] for t in (*leaves(x), *leaves(y)))
        if self._taken is not None and not fake:
            self._taken.write(step, taken)
        return microbatches

    def close(self) -> None:
        """End the workers after the last step."""
        self._read = None

    def _wanted_parts(self, step: int) -> list[slice]:
        """Return the parts of a step's batch that this rank takes."""
        size = self._source.size(step)
        return [share(start, end, self._place, self._n) for start, end in split(size, min(self._m, size))]

    def _load_parts(self, step: int) -> Parts:
        """Read what this rank takes of a step's batch, or wait for the workers that do."""
        op = self._record.begin(Kind.DATA, "data") if self._source.loads else -1
        if self._source.num_workers and self._read is None:
            loader = DataLoader(
                self._steps, batch_size=None, sampler=self._order, num_workers=self._source.num_workers,
                collate_fn=_as_they_are, multiprocessing_context="fork", worker_init_fn=_die_with_the_rank,
                generator=torch.Generator().manual_seed(0),
            )  # fmt: skip
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # threads do not survive a fork
                self._read = iter(loader)
        parts = self._steps[step] if self._read is None else next(self._read)
        if self._source.loads:
            nbytes = sum(t.nbytes for x, y in parts.values() for t in (*leaves(x), *leaves(y)))
            self._record.end(op, nbytes=nbytes)
        return parts

    def _load(self, step: int, which: slice, key: Hashable) -> tuple[Value, Value]:
        inputs, targets = self._parts_of_step[which.start, which.stop, which.step or 1]
        shapes = signature(inputs, targets)
        if shapes != key or shapes not in self._known:
            raise MpkitError(
                f"The samples of step {step} have other shapes than the dataset's first one: {_shapes(shapes)} and not "
                f"{_shapes(key)}, so nobody knows what the layers make of them. All samples of a dataset need the same "
                "shapes: pad or cut them in its __getitem__. Batches of several shapes can be data itself, as a list."
            )
        # ---- cut
        if self._parts == 1:
            return inputs, targets
        check_not_packed(inputs, self._parts)
        cut = partial(sequence_part, index=self._cp, n=self._parts, order=self._plan.cp_order)
        return cut(inputs), cut(targets)


def _shapes(key: Hashable) -> str:
    assert isinstance(key, tuple)
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for _, shape, dtype in key)


# ---- load ----------------------------------------------------------------------------------------------------

Parts = dict[tuple[int, int, int], tuple[Value, Value]]
"""(inputs, targets) by their position in the batch: (start, stop, stride)."""


class _Steps(Dataset[Parts]):
    """The parts that a rank takes, by step."""

    def __init__(self, source: WholeBatches | Batches, wanted: Callable[[int], list[slice]]) -> None:
        self._source, self._wanted = source, wanted

    def __getitem__(self, step: int) -> Parts:
        """Read the parts of a step's batch now."""
        wanted = self._wanted(step)
        return {(w.start, w.stop, w.step or 1): self._source.part(step, w) for w in wanted}


def _as_they_are(parts: Any) -> Any:
    return parts


def _die_with_the_rank(_worker: int) -> None:
    """Let a worker end with its rank, however the rank ends; torch's own watchdog takes seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

"""ScatterFeed: the batches of DP, where rank 0 holds the data and scatters it.

Every rank's share is the one that `mpkit.strategies.job.feed` would give it. torch.nn.DataParallel scatters blocks
instead of every n-th sample, which makes no difference to a mean over the batch. The other ranks read their own share
as well, for its shapes and for `Run.data_digest`, but compute on what rank 0 sends.

The tensors of a batch are packed into rows, so that a part of the batch is one message. A row holds all bytes that
belong to one sample: (features, mask) of a batch of 8 become a tensor of 8 rows. Shares of different lengths are padded
to one length before they are sent, since scatter and gather work with equal parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mpkit.strategies.data.microbatch import Value, share, split
from mpkit.strategies.job.feed import Feed, MicroBatch

if TYPE_CHECKING:
    from mpkit.strategies.job.job import TrainJob
    from mpkit.strategies.rank_context import Context

__all__ = [
    "RowSpec",
    "ScatterFeed",
    "ScatteredMicroBatch",
    "as_bytes",
    "pack_rows",
    "pad_rows",
    "row_bytes",
    "unpack_rows",
]


class RowSpec(NamedTuple):
    """The part of a tensor that belongs to one sample: its shape without the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> RowSpec:
        """Return the spec of a tensor (batch, ...)."""
        return cls(tuple(tensor.shape[1:]), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """The number of bytes per sample."""
        return prod(self.shape) * self.dtype.itemsize


def row_bytes(specs: Sequence[RowSpec]) -> int:
    """Return the number of bytes per row."""
    return sum(spec.nbytes for spec in specs)


def pack_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Pack tensors (rows, ...) into one of (rows, bytes).

    >>> pack_rows([torch.zeros(3, 2, 2), torch.zeros(3, dtype=torch.int64)]).shape
    torch.Size([3, 24])
    """
    parts = [
        as_bytes(tensor.detach()).view(tensor.shape[0], RowSpec.from_tensor(tensor).nbytes)
        for tensor in tensors
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def unpack_rows(packed: Tensor, specs: Sequence[RowSpec]) -> tuple[Tensor, ...]:
    """Unpack (rows, bytes) into the tensors (rows, ...) that were packed.

    >>> unpack_rows(pack_rows([torch.ones(1, 2), torch.tensor([True])]), [((2,), torch.float32), ((), torch.bool)])
    (tensor([[1., 1.]]), tensor([True]))
    """
    tensors, at = [], 0
    for spec in map(RowSpec._make, specs):
        part = packed[:, at : at + spec.nbytes].reshape(-1)
        if part.storage_offset() % spec.dtype.itemsize:
            part = part.clone()  # a value must begin at a multiple of its size
        tensors.append(part.view(spec.dtype).view(packed.shape[0], *spec.shape))
        at += spec.nbytes
    return tuple(tensors)


def pad_rows(packed: Tensor, rows: int) -> Tensor:
    """Pad with rows of zeros to the given number of rows."""
    if packed.shape[0] == rows:
        return packed
    return torch.cat([packed, packed.new_zeros(rows - packed.shape[0], packed.shape[1])])


def as_bytes(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor in order, (n,) of uint8; a view where that is possible."""
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # also for a single value that was expanded
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


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
                    *(self._load(step, part, key) for part, key in others),
                ]
            whole = (end - start) / size
            microbatches.append(
                ScatteredMicroBatch(own.inputs, own.targets, own.key, own.weight, rows, keys, by_rank, whole)
            )
        return microbatches

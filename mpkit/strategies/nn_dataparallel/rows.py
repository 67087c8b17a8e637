"""Rows: the tensors of a batch packed side by side, so that a part of the batch is one message.

A row holds all bytes that belong to one sample: (features, mask) of a batch of 8 become a tensor of 8 rows. Shares of
different lengths are padded to one length before they are sent, since scatter and gather work with equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RowSpec", "as_bytes", "pack_rows", "pad_rows", "row_bytes", "unpack_rows"]


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

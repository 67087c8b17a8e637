"""The file of a rank's evidence: a pickle, and after it the bytes of its tensors, which the reader maps and not copies.

    index      8 bytes: the length of the pickle and of the list of the tensors' lengths; then both
    tensors    their bytes, each from a multiple of 64 bytes on

Source: PEP 574, "Pickle protocol 5 with out-of-band data".
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpkit.common.disk import write_whole

__all__ = ["read_evidence", "write_evidence"]

ALIGNED = 64
"""Bytes; what torch reads fastest."""


def write_evidence(path: Path, evidence: Any) -> None:
    """Write a file, completely or not at all.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "evidence"
    >>> write_evidence(path, {"step": 3, "weights": [torch.ones(3), torch.zeros(2, 0), torch.tensor(True)]})
    >>> read_evidence(path)
    {'step': 3, 'weights': [tensor([1., 1., 1.]), tensor([], size=(2, 0)), tensor(True)]}
    """
    buffers: list[pickle.PickleBuffer] = []
    written = BytesIO()
    _Pickler(written, protocol=5, buffer_callback=buffers.append).dump(evidence)
    tensors = [buffer.raw() for buffer in buffers]
    index = pickle.dumps((written.getvalue(), [tensor.nbytes for tensor in tensors]))
    head = len(index).to_bytes(8, "little") + index
    write_whole(path, head, *_align_tensors(len(head), tensors))


def _align_tensors(written: int, tensors: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    for tensor in tensors:
        yield bytes(-written % ALIGNED)
        yield tensor
        written += -written % ALIGNED + tensor.nbytes


def read_evidence(path: Path) -> Any:
    """Return what a rank of this process's own launch has written."""
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    at = 8 + int.from_bytes(view[:8], "little")
    pickled, lengths = pickle.loads(view[8:at])
    buffers = []
    for length in lengths:
        at += -at % ALIGNED
        buffers.append(view[at : at + length])
        at += length
    return pickle.loads(pickled, buffers=buffers)


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        held: Any = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(held), obj.dtype, obj.shape)


def _tensor(held: memoryview, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return (torch.frombuffer(held, dtype=dtype) if held.nbytes else torch.empty(0, dtype=dtype)).reshape(
        shape
    )

"""Stream: data that is read one batch after the other, with only a few batches in memory at a time.

    is_stream    data with neither a length nor numbered batches: a generator, an IterableDataset, a DataLoader of one
    first        the batches that are inspected before the start
    read         all batches, in order

Batches are read in the caller's process and sent to the ranks on request (`mpkit.strategies.data.feeder`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from mpkit.strategies.data.fed_batches import FedBatches
from mpkit.strategies.data.microbatch import Value, batch_size, signature
from mpkit.strategies.data.pairs import checked_batch

__all__ = ["FIRST", "Stream", "UnfitBatch", "is_stream"]

FIRST = 2
"""Batches that are inspected before the start."""


class UnfitBatch(ValueError):
    """A batch that training cannot use, found after the start."""


def is_stream(data: Any) -> bool:
    """Return whether the data yields batches one after the other, in unknown number.

    >>> is_stream(iter([])), is_stream([]), is_stream(DataLoader([1, 2]))
    (True, False, False)
    """
    if isinstance(data, DataLoader):
        return isinstance(data.dataset, IterableDataset)
    if isinstance(data, IterableDataset):
        return True
    return (
        isinstance(data, Iterable)
        and not isinstance(data, (Tensor, str, bytes, Mapping))
        and not hasattr(data, "__len__")
    )


class Stream:
    """Batches that are read in order.

    Args:
        data: yields (inputs, targets), each a whole batch.
        steps: the number of batches needed.

    Raises:
        ValueError: the data yields nothing, or something that is not a batch.
    """

    loads = True
    num_workers = 0
    prefetch: int | None = None
    pin_memory = False

    def __init__(self, data: Any, steps: int) -> None:
        self._data, self._steps = data, steps
        self._iterator = iter(data)
        self._begins_anew = self._iterator is not data
        self.first = [
            checked_batch(item, i) for i, item in enumerate(islice(self._iterator, min(FIRST, steps)))
        ]
        if not self.first:
            raise ValueError("data is empty: it gave no batch. A generator gives its batches once")
        self._known = {signature(*batch) for batch in self.first}

    def __len__(self) -> int:
        """Return the number of batches needed."""
        return self._steps

    def __reduce__(self) -> tuple[type[FedBatches], tuple[()]]:
        """Pickle the stream as `FedBatches`, which is what the ranks receive."""
        return FedBatches, ()

    def size(self, step: int) -> int:
        """Return the number of samples in a batch that was inspected before the start."""
        return batch_size(self.first[step][0])

    def read(self) -> Generator[tuple[Value, Value], None, None]:
        """Yield every batch once; iterable data begins anew at its end, as in another epoch.

        Raises:
            UnfitBatch: an item is not a batch, or has shapes that did not occur before the start.
        """
        yield from self.first
        number, came = len(self.first), len(self.first)
        while True:
            for item in self._iterator:
                yield self._check_item(item, number)
                number, came = number + 1, came + 1
            if not self._begins_anew or not came:
                return
            self._iterator, came = iter(self._data), 0

    def close(self) -> None:
        """Stop reading, which also ends the workers of a DataLoader."""
        self._iterator = iter(())

    def _check_item(self, item: Any, number: int) -> tuple[Value, Value]:
        try:
            batch = checked_batch(item, number)
        except ValueError as error:
            raise UnfitBatch(str(error)) from None
        shapes = signature(*batch)
        if shapes not in self._known:
            known = " or ".join(_shapes(each) for each in self._known)
            raise UnfitBatch(
                f"batch {number} of the data has the shapes {_shapes(shapes)}. Of data that come one after the other "
                f"the first {len(self.first)} are looked at before the start, and these had {known}; what the layers "
                "make of others nobody knows. Pad or cut the batches; drop_last=True leaves out a smaller last one; or "
                "give them as a list, all of which is looked at."
            )
        return batch


def _shapes(key: Any) -> str:
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for _, shape, dtype in key)

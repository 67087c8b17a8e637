"""Stream: data that comes one batch after the other, of which no more than a few are held at a time.

    is_stream    what has neither a length nor numbered batches: a generator, an IterableDataset, a DataLoader of one
    first        the batches that are looked at before the start
    read         all of them, in order

What is read in the caller's process goes to the ranks as they ask for it (`mpkit.feeding`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from mpkit.data_pairs import checked_batch
from mpkit.parallel.fed import FedBatches
from mpkit.parallel.microbatch import Value, batch_size, signature

__all__ = ["FIRST", "Stream", "UnfitBatch", "is_stream"]

FIRST = 2
"""Batches that are looked at before the start."""


class UnfitBatch(ValueError):
    """A batch that cannot be trained on, found after the start."""


def is_stream(data: Any) -> bool:
    """Whether batches have to be taken from it one after the other, nobody knows how many.

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
    """Batches as they come.

    Args:
        data: gives (inputs, targets), each a whole batch.
        steps: how many batches are wanted.

    Raises:
        ValueError: it gives nothing, or what is no batch.
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
        """The batches that are wanted."""
        return self._steps

    def __reduce__(self) -> tuple[type[FedBatches], tuple[()]]:
        """What of it goes to the ranks: that they are fed."""
        return FedBatches, ()

    def size(self, step: int) -> int:
        """How many samples a batch has that was looked at."""
        return batch_size(self.first[step][0])

    def read(self) -> Generator[tuple[Value, Value], None, None]:
        """Every batch, once; what can be gone through again begins anew at its end, as in another epoch.

        Raises:
            UnfitBatch: one is no batch, or has shapes that no one knew of before the start.
        """
        yield from self.first
        number, came = len(self.first), len(self.first)
        while True:
            for item in self._iterator:
                yield self._fitting(item, number)
                number, came = number + 1, came + 1
            if not self._begins_anew or not came:
                return
            self._iterator, came = iter(self._data), 0

    def close(self) -> None:
        """Nothing more is read; workers of a DataLoader end."""
        self._iterator = iter(())

    def _fitting(self, item: Any, number: int) -> tuple[Value, Value]:
        try:
            batch = checked_batch(item, number)
        except ValueError as error:
            raise UnfitBatch(str(error)) from None
        found = signature(*batch)
        if found not in self._known:
            known = " or ".join(_shapes(each) for each in self._known)
            raise UnfitBatch(
                f"batch {number} of the data has the shapes {_shapes(found)}. Of data that come one after the other "
                f"the first {len(self.first)} are looked at before the start, and these had {known}; what the layers "
                "make of others nobody knows. Pad or cut the batches; drop_last=True leaves out a smaller last one; or "
                "give them as a list, all of which is looked at."
            )
        return batch


def _shapes(key: Any) -> str:
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for _, shape, dtype in key)

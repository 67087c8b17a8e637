"""Who holds how much memory: a ledger of storages by category.

What counts is the storage, not the tensor: views, tied weights and a gradient kept in a bucket share one, and it
is counted once. A storage leaves the ledger when it dies, so nothing has to be said when memory is freed.
"""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections import deque
from typing import Any

import torch

from mpkit.record.files import RecordFile
from mpkit.trace import CATEGORIES, HEADER, MEMORY

__all__ = ["Claim", "Ledger"]

_PACK = struct.Struct("<qIB3xq").pack_into  # one MEMORY record
_FIRST, _SIZE = HEADER.itemsize, MEMORY.itemsize
_NUMBER = {category: number for number, category in enumerate(CATEGORIES)}


class Claim:
    """The storages that a forward saved and nobody else had in the ledger; see `mpkit.record.saved`.

    Attributes:
        nbytes: bytes of all of them.
        alive: bytes of those that have not died yet.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.alive = 0

    def add(self, nbytes: int) -> None:
        """A storage is claimed; with a negative number, it turned out to be somebody else's."""
        self.nbytes += nbytes
        self.alive += nbytes


class _Entry(weakref.ref[Any]):
    """A storage in the ledger; dies with it, and knows what to take off then."""

    __slots__ = ("category", "claim", "key", "nbytes")

    category: int
    claim: Claim | None
    key: int
    nbytes: int


class Ledger:
    """Bytes held on the rank's device by category, each storage counted once: the first category wins.

    What lives elsewhere is not counted: on a GPU's ledger nothing of the host's memory, and nowhere the
    step counters that Adam keeps in host scalars (`mpkit.record.hooks` leaves them out).

    Attributes:
        held: bytes by category, now.
    """

    def __init__(self, file: RecordFile, ops: RecordFile, device: torch.device | None = None) -> None:
        self._file = file
        self._ops = ops
        self._device = device.type if device is not None else "cpu"
        self._entries: dict[int, _Entry] = {}
        self._pending: deque[tuple[int, int, int]] = deque()
        self._writing = threading.Lock()
        self.held = dict.fromkeys(CATEGORIES, 0)

    def track(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage from now until it dies; one that is known stays in its category."""
        entry = self._enter(tensor, _number(category), None)
        if entry is not None and entry.claim is not None:
            entry.claim.add(-entry.nbytes)
            entry.claim = None

    def move(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage in this category from now on, wherever it was before."""
        new = _number(category)
        self.track(tensor, category)
        entry = self._enter(tensor, new, None)
        if entry is not None and entry.category != new:
            self.change(CATEGORIES[entry.category], -entry.nbytes)
            self.change(category, entry.nbytes)
            entry.category = new

    def claim(self, tensor: torch.Tensor, category: str, claim: Claim) -> None:
        """Track the tensor; a storage that is new is added to `claim` until `track` is called for it."""
        self._enter(tensor, _number(category), claim)

    def change(self, category: str, delta: int) -> None:
        """Count `delta` bytes more without naming a tensor."""
        self._change(_number(category), delta)

    def _change(self, category: int, delta: int) -> None:
        # This may be called at any moment by any thread, also in the middle of itself: the death of a storage
        # is noticed wherever the garbage collector happens to run. So nobody waits for the lock: the change
        # is queued, and whoever holds the lock writes the queue.
        self._pending.append((time.monotonic_ns(), category, delta))
        while self._pending and self._writing.acquire(blocking=False):
            try:
                while self._pending:
                    self._write(*self._pending.popleft())
            finally:
                self._writing.release()

    def _write(self, now: int, category: int, delta: int) -> None:
        self.held[CATEGORIES[category]] += delta
        file = self._file
        index = file.count
        if index < file.capacity or file.grow():
            _PACK(file.map, _FIRST + _SIZE * index, now, self._ops.count, category, delta)
            file.publish(index + 1)

    def _enter(self, tensor: torch.Tensor, category: int, claim: Claim | None) -> _Entry | None:
        """The entry of the tensor's storage, made if there is none; None for what is not counted."""
        if tensor.device.type != self._device:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or a subclass made of other tensors
            return None
        key, nbytes = storage._cdata, storage.nbytes()
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(storage, self._died)
            entry.key, entry.category, entry.nbytes, entry.claim = key, category, nbytes, claim
            self._entries[key] = entry
            self._change(category, nbytes)
            if claim is not None:
                claim.add(nbytes)
        elif entry.nbytes != nbytes:  # resized in place
            self._change(entry.category, nbytes - entry.nbytes)
            entry.nbytes = nbytes
        return entry

    def _died(self, entry: weakref.ref[Any]) -> None:
        assert isinstance(entry, _Entry)
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        if entry.claim is not None:
            entry.claim.alive -= entry.nbytes
        self._change(entry.category, -entry.nbytes)


def _number(category: str) -> int:
    number = _NUMBER.get(category)
    if number is None:
        raise ValueError(f"memory has the categories {', '.join(CATEGORIES)}, and none called {category!r}")
    return number

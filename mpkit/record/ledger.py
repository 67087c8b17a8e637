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

__all__ = ["Ledger"]

_PACK = struct.Struct("<qIB3xq").pack_into  # one MEMORY record
_FIRST = HEADER.itemsize
_SIZE = MEMORY.itemsize


class _Entry(weakref.ref[Any]):
    """A storage in the ledger: dies with it and knows what to take off."""

    __slots__ = ("category", "claim", "key", "nbytes")

    category: int
    key: int
    nbytes: int
    claim: dict[int, int] | None  # whoever counted it provisionally, by key


class Ledger:
    """Bytes held by category, each storage counted once: the first category wins.

    Attributes:
        held: bytes by category, now.
    """

    def __init__(self, file: RecordFile, ops: RecordFile) -> None:
        self._file = file
        self._ops = ops
        self._entries: dict[int, _Entry] = {}
        self._pending: deque[tuple[int, int, int]] = deque()
        self._writing = threading.Lock()
        self.held = dict.fromkeys(CATEGORIES, 0)

    def track(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage from now until it dies; one that is known stays in its category."""
        self._enter(tensor, CATEGORIES.index(category), None)

    def move(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage in another category from now on (an activation kept as a gradient, say)."""
        entry = self._enter(tensor, CATEGORIES.index(category), None)
        new = CATEGORIES.index(category)
        if entry is not None and entry.category != new:
            self.change(entry.category, -entry.nbytes)
            self.change(new, entry.nbytes)
            entry.category = new

    def change(self, category: int, delta: int) -> None:
        """Write that `delta` bytes more are held in CATEGORIES[category].

        May be called at any moment by any thread, also in the middle of itself: the death of a storage can
        be noticed by the garbage collector wherever Python is. So nobody waits: the change is queued, and
        whoever holds the lock writes the queue.
        """
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

    def _enter(self, tensor: torch.Tensor, category: int, claim: dict[int, int] | None) -> _Entry | None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(storage, self._died)
            entry.key, entry.category, entry.nbytes, entry.claim = key, category, nbytes, claim
            self._entries[key] = entry
            self.change(category, nbytes)
        elif entry.nbytes != nbytes:  # resized in place
            self.change(entry.category, nbytes - entry.nbytes)
            entry.nbytes = nbytes
        return entry

    def _died(self, entry: weakref.ref[Any]) -> None:
        assert isinstance(entry, _Entry)
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        self.change(entry.category, -entry.nbytes)

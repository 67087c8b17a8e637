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
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

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
    """A storage in the ledger; with a callback, it tells when the storage dies."""

    __slots__ = ("block", "category", "claim", "key", "nbytes")

    block: list[_Entry] | None  # what was entered together with it, itself included
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
        self._is_here = attrgetter(f"is_{device.type if device is not None else 'cpu'}")
        self._entries: dict[int, _Entry] = {}
        self._queue: deque[tuple[int, int, int]] = deque()
        self._writing = threading.Lock()
        self.held = dict.fromkeys(CATEGORIES, 0)

    def track(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage from now until it dies; one that is known stays in its category."""
        entry, is_new = self._find(tensor, _number(category), self._died)
        if entry is not None and is_new:
            self._change((entry.category, entry.nbytes))
        elif entry is not None and entry.claim is not None:
            entry.claim.add(-entry.nbytes)
            entry.claim = None

    def move(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage in this category from now on, wherever it was before."""
        self.track(tensor, category)
        new = _number(category)
        entry, _ = self._find(tensor, new, self._died)
        if entry is not None and entry.category != new:
            self._change((entry.category, -entry.nbytes))
            self._change((new, entry.nbytes))
            entry.category = new

    def claim(self, tensor: torch.Tensor, category: str, claim: Claim) -> None:
        """Track the tensor; a storage that is new is added to `claim` until `track` is called for it."""
        entry, is_new = self._find(tensor, _number(category), self._died)
        if entry is not None and is_new:
            self._change((entry.category, entry.nbytes))
            entry.claim = claim
            claim.add(entry.nbytes)

    def enter(self, tensors: Iterable[torch.Tensor], category: str) -> int:
        """Take in tensors that came together and will go together, in this order; returns the bytes that are new.

        The caller writes the `change`. Only the last one's death is noticed, and those of the others with it, or
        when somebody stumbles on them: so a hundred gradients that `zero_grad` drops cost as much as one.
        """
        block: list[_Entry] = []
        for tensor in tensors:
            entry, is_new = self._find(tensor, _number(category), None)
            if entry is not None and is_new:
                entry.block = block
                block.append(entry)
        if block:
            block[-1] = self._again(block[-1])
        return sum(entry.nbytes for entry in block)

    def change(self, *deltas: tuple[str, int]) -> None:
        """Count so many bytes more in these categories, without naming a tensor: `change(("grads", 400))`.

        May be called at any moment by any thread.
        """
        self._change(*[(_NUMBER[category], delta) for category, delta in deltas if delta])

    def _change(self, *deltas: tuple[int, int]) -> None:
        # Also in the middle of itself: the death of a storage is noticed wherever the garbage collector happens
        # to run. So nobody waits for the lock: whoever finds it taken queues the change, and whoever holds it
        # looks at the queue after letting it go.
        now = time.monotonic_ns()
        if self._writing.acquire(False):
            try:
                for category, delta in deltas:
                    self._write(now, category, delta)
            finally:
                self._writing.release()
        else:
            self._queue.extend((now, *delta) for delta in deltas)
        while self._queue and self._writing.acquire(False):
            try:
                while self._queue:
                    self._write(*self._queue.popleft())
            finally:
                self._writing.release()

    def _write(self, now: int, category: int, delta: int) -> None:
        self.held[CATEGORIES[category]] += delta
        file = self._file
        index = file.count
        if index < file.capacity or file.grow():
            _PACK(file.map, _FIRST + _SIZE * index, now, self._ops.count, category, delta)
            file.publish(index + 1)

    def _find(
        self, tensor: torch.Tensor, category: int, died: Callable[[weakref.ref[Any]], None] | None
    ) -> tuple[_Entry | None, bool]:
        """The entry of the tensor's storage, and whether it is new; None for what is not counted."""
        if not self._is_here(tensor):
            return None, False
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or a subclass made of other tensors
            return None, False
        key, nbytes = storage._cdata, storage.nbytes()
        entry = self._entries.get(key)
        if entry is not None and entry() is None:  # it died, and nobody noticed
            self._sweep(entry)
            entry = None
        if entry is None:
            self._entries[key] = entry = _Entry(storage, died)
            entry.key, entry.category, entry.nbytes = key, category, nbytes
            entry.claim = entry.block = None
            return entry, True
        if entry.nbytes != nbytes:  # resized in place
            self._change((entry.category, nbytes - entry.nbytes))
            entry.nbytes = nbytes
        return entry, False

    def _died(self, entry: weakref.ref[Any]) -> None:
        if TYPE_CHECKING:
            assert isinstance(entry, _Entry)
        if entry.claim is not None:
            entry.claim.alive -= entry.nbytes
        self._sweep(entry)

    def _sweep(self, dead: _Entry) -> None:
        """Take off a dead storage, and what is dead of its block; what is not stands for itself from now on."""
        freed = 0
        for entry in dead.block or (dead,):
            if entry() is not None:
                self._again(entry).block = None
            elif self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                if entry.category == dead.category:
                    freed += entry.nbytes
                else:  # moved
                    self._change((entry.category, -entry.nbytes))
        if freed:
            self._change((dead.category, -freed))

    def _again(self, entry: _Entry) -> _Entry:
        """The same entry with notice of its storage's death."""
        again = _Entry(entry(), self._died)
        again.key, again.category, again.nbytes = entry.key, entry.category, entry.nbytes
        again.claim, again.block = entry.claim, entry.block
        self._entries[entry.key] = again
        return again


def _number(category: str) -> int:
    number = _NUMBER.get(category)
    if number is None:
        raise ValueError(f"memory has the categories {', '.join(CATEGORIES)}, and none called {category!r}")
    return number

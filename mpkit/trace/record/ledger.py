"""Which memory is held for what: a ledger of storages by category.

The ledger counts storages, not tensors: views, tied weights and a gradient in a bucket share a storage, which is
counted once. A storage leaves the ledger when it is freed, so nothing has to be reported when memory is freed.
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

from mpkit.trace import CATEGORIES, HEADER, MEMORY
from mpkit.trace.record.files import RecordFile

__all__ = ["Claim", "Ledger"]

_PACK = struct.Struct("<qIB3xq").pack_into  # one MEMORY record
_FIRST, _SIZE = HEADER.itemsize, MEMORY.itemsize
_NUMBER = {category: number for number, category in enumerate(CATEGORIES)}
_PASSING = _NUMBER["buffers"]


class Claim:
    """The storages that a forward saved and that were not in the ledger before; see `mpkit.trace.record.saved_tensors`.

    Attributes:
        nbytes: bytes of all these storages.
        alive: bytes of those that have not been freed yet.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.alive = 0

    def add(self, nbytes: int) -> None:
        """Add the bytes of a claimed storage; a negative number takes back a storage that belongs elsewhere."""
        self.nbytes += nbytes
        self.alive += nbytes


class _Entry(weakref.ref[Any]):
    """A storage in the ledger, as a weak reference whose callback runs when the storage is freed."""

    __slots__ = ("block", "category", "claim", "key", "nbytes", "passing")

    block: (
        tuple[list[weakref.ref[torch.Tensor]], int] | None
    )  # the tensors that it also stands for, and their bytes
    category: int
    claim: Claim | None
    key: int
    nbytes: int
    passing: bool  # whether it was only noticed, and nothing has said yet what it is for


class Ledger:
    """The bytes held on the rank's device by category, with each storage counted once, in its first category.

    Memory elsewhere is not counted: a GPU's ledger has none of the host's memory, and no ledger has the step counters
    that Adam keeps in host scalars (`mpkit.trace.record.hooks` leaves them out).

    Attributes:
        held: the bytes currently held, by category.
        notices: whether every storage is noticed as it is made (`notice`), temporaries too.
    """

    def __init__(
        self,
        file: RecordFile,
        ops: RecordFile,
        device: torch.device | None = None,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._now = now
        self._file = file
        self._ops = ops
        self._is_here = attrgetter(f"is_{device.type if device is not None else 'cpu'}")
        self._entries: dict[int, _Entry] = {}
        self._blocks: set[int] = set()  # keys of entries that also stand for others
        self._queue: deque[tuple[int, int, int]] = deque()
        self._writing = threading.Lock()
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.notices = False

    def track(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage from now until it is freed; a known storage keeps its category."""
        if self._blocks and category == "grads":
            self._resolve()
        entry, is_new = self._find(tensor, _number(category))
        if entry is not None and is_new:
            self._change((entry.category, entry.nbytes))
        elif entry is not None and entry.claim is not None:
            entry.claim.add(-entry.nbytes)
            entry.claim = None

    def notice(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage as "buffers" until `track` or `claim` says what it is for, if they ever do.

        An operator's result is noticed as soon as it is made. What is freed without being tracked was a temporary, such
        as the copies that a loss's backward makes of the logits.
        """
        entry, is_new = self._find(tensor, _PASSING, passing=True)
        if entry is not None and is_new:
            self._change((_PASSING, entry.nbytes))

    def move(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage in this category from now on, wherever it was before."""
        self._resolve()
        self.track(tensor, category)
        new = _number(category)
        entry, _ = self._find(tensor, new)
        if entry is not None and entry.category != new:
            self._change((entry.category, -entry.nbytes))
            self._change((new, entry.nbytes))
            entry.category = new

    def claim(self, tensor: torch.Tensor, category: str, claim: Claim) -> None:
        """Track the tensor; a new storage belongs to `claim` until `track` is called for it."""
        entry, is_new = self._find(tensor, _number(category))
        if entry is not None and is_new:
            self._change((entry.category, entry.nbytes))
            entry.claim = claim
            claim.add(entry.nbytes)

    def enter(self, tensors: Iterable[torch.Tensor], category: str) -> int:
        """Track the tensors, and return the bytes of new storages. The caller writes the `change`."""
        self._resolve()
        entries = [self._find(tensor, _number(category)) for tensor in tensors]
        return sum(entry.nbytes for entry, is_new in entries if entry is not None and is_new)

    def enter_block(
        self, others: list[weakref.ref[torch.Tensor]], nbytes: int, last: torch.Tensor, category: str
    ) -> int:
        """Track tensors that are made together and freed together, `last` last, at the cost of one.

        The others must be new and have storages of their own, `nbytes` in total. They are checked when the last one is
        freed, or earlier if one of them may be needed. As with `enter`, the new bytes are returned and the caller
        writes the change.
        """
        entry, is_new = self._find(last, _number(category))
        if entry is None or not is_new:
            tensors = (other() for other in others)
            return self.enter([tensor for tensor in tensors if tensor is not None], category)
        entry.block = others, nbytes
        self._blocks.add(entry.key)
        return nbytes + entry.nbytes

    def change(self, *deltas: tuple[str, int]) -> None:
        """Add bytes to these categories without naming a tensor: `change(("grads", 400))`.

        Any thread may call it at any moment.
        """
        self._change(*[(_NUMBER[category], delta) for category, delta in deltas])

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that was resized in place at its new size; one that is not in the ledger stays out of it."""
        entry = self._entries.get(storage._cdata)
        if entry is not None and entry.nbytes != storage.nbytes():
            before, entry.nbytes = entry.nbytes, storage.nbytes()
            self._change((entry.category, entry.nbytes - before))

    def forget(self) -> None:
        """Keep the sums, and forget the storages that they are made of: freeing these changes nothing any more."""
        self._resolve()
        self._entries.clear()

    def clear(self) -> None:
        """Start anew, with nothing held."""
        self.forget()
        self.change(*[(category, -nbytes) for category, nbytes in self.held.items()])

    def _change(self, *deltas: tuple[int, int]) -> None:
        # It may even be called within itself, since freed storages are noticed wherever the garbage collector
        # happens to run. So nothing waits for the lock: a call that finds it taken queues the change, and the call
        # that holds it checks the queue after releasing it.
        now = self._now()
        if self._writing.acquire(False):
            try:
                for category, delta in deltas:
                    if delta:
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
        self, tensor: torch.Tensor, category: int, *, passing: bool = False
    ) -> tuple[_Entry | None, bool]:
        """Return the entry of the tensor's storage, and whether it is new; (None, False) if it is not counted.

        A storage that was only noticed so far is new to whoever tracks it.
        """
        if not self._is_here(tensor):
            return None, False
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or a subclass made of other tensors
            return None, False
        key, nbytes = storage._cdata, storage.nbytes()
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = entry = _Entry(storage, self._note_release)
            entry.key, entry.category, entry.nbytes = key, category, nbytes
            entry.claim = entry.block = None
            entry.passing = passing
            return entry, True
        if entry.nbytes != nbytes:  # resized in place
            self._change((entry.category, nbytes - entry.nbytes))
            entry.nbytes = nbytes
        if entry.passing and not passing:
            self._change((entry.category, -nbytes))
            entry.category, entry.passing = category, False
            return entry, True
        return entry, False

    def _note_release(self, entry: weakref.ref[Any]) -> None:
        if TYPE_CHECKING:
            assert isinstance(entry, _Entry)
        if entry.claim is not None:
            entry.claim.alive -= entry.nbytes
        freed = entry.nbytes + self._break_up(entry)
        del self._entries[entry.key]
        self._change((entry.category, -freed))

    def _resolve(self) -> None:
        """Let each tensor of a block stand for itself."""
        for key in list(self._blocks):
            entry = self._entries[key]
            self._change((entry.category, -self._break_up(entry)))

    def _break_up(self, entry: _Entry) -> int:
        """End the entry's block, if any: tensors that are alive enter by themselves; return the bytes of the others."""
        if entry.block is None:
            return 0
        (others, nbytes), entry.block = entry.block, None
        self._blocks.discard(entry.key)
        for other in others:
            tensor = other()
            if tensor is not None:
                alive, is_new = self._find(tensor, entry.category)
                if alive is not None and is_new:
                    nbytes -= alive.nbytes
        return nbytes


def _number(category: str) -> int:
    number = _NUMBER.get(category)
    if number is None:
        raise ValueError(f"memory has the categories {', '.join(CATEGORIES)}, and none called {category!r}")
    return number

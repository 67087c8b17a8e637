"""What memory is held for: a ledger of storages by category.

The ledger counts storages, not tensors: views, tied weights and a gradient in a bucket share a storage, which counts
once. A storage leaves the ledger when it is freed, so nobody has to report that.

A *quiet* ledger goes on counting but writes nothing: another step's curve is written in its place
(`mpkit.trace.record.memory`). When it is *awake* again, it writes what has changed meanwhile.
"""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from mpkit.trace import CATEGORIES, HEADER, MEMORY
from mpkit.trace.record.files import RecordFile

_PACK = struct.Struct("<qIB3xq").pack_into  # one MEMORY record
_FIRST, _SIZE = HEADER.itemsize, MEMORY.itemsize
_NUMBER = {category: number for number, category in enumerate(CATEGORIES)}
_PASSING = _NUMBER["buffers"]


class _Entry(weakref.ref[Any]):
    """A storage in the ledger, as a weak reference whose callback runs when the storage is freed."""

    __slots__ = ("category", "key", "nbytes", "passing")

    category: int
    key: int
    nbytes: int
    passing: bool  # it was only noticed, and nothing has said yet what it is for


class Ledger:
    """The bytes held on the rank's device by category; each storage counts once, in its first category.

    Memory elsewhere does not count: neither the host's on a GPU, nor the step counters that Adam keeps in host scalars
    (`mpkit.trace.record.hooks` leaves them out).

    Attributes:
        held: the bytes held by category, as written.
        captured: where changes are noted too, as (ops begun before, time, category, bytes); None: nowhere.
        on_use: called before anything is counted, once, while it is set; it wakes the ledger.
    """

    def __init__(
        self, file: RecordFile, ops: RecordFile, device: torch.device | None = None,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:  # fmt: skip
        self._now, self._file, self._ops = now, file, ops
        self._is_here = attrgetter(f"is_{device.type if device is not None else 'cpu'}")
        self._entries: dict[int, _Entry] = {}
        self._queue: deque[tuple[int, int, int]] = deque()
        self._writing = threading.Lock()
        self._counted = [0] * len(CATEGORIES)  # as `held`, but for what a quiet ledger has not written
        self._quiet = False
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.captured: list[tuple[int, int, int, int]] | None = None
        self.on_use: Callable[[], None] | None = None

    def track(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage from now until it is freed; a known storage keeps its category."""
        entry, is_new = self._find(tensor, _number(category))
        if entry is not None and is_new:
            self._change((entry.category, entry.nbytes))

    def notice(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage as "buffers" until `track` says what it is for, if it ever does.

        An operator's result is noticed as soon as it is made. One that is freed without being tracked was a temporary,
        such as the copies that a loss's backward makes of the logits.
        """
        entry, is_new = self._find(tensor, _PASSING, passing=True)
        if entry is not None and is_new:
            self._change((_PASSING, entry.nbytes))

    def move(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage in this category from now on."""
        self.track(tensor, category)
        new = _number(category)
        entry, _ = self._find(tensor, new)
        if entry is not None and entry.category != new:
            self._change((entry.category, -entry.nbytes))
            self._change((new, entry.nbytes))
            entry.category = new

    def change(self, *deltas: tuple[str, int]) -> None:
        """Add bytes to categories without naming a tensor, from any thread: `change(("grads", 400))`."""
        if self.on_use is not None:
            self.on_use()
        self._change(*[(_NUMBER[category], delta) for category, delta in deltas])

    def correct(self, *deltas: tuple[str, int]) -> None:
        """Write what the device's allocator knows better, even while quiet; no step's curve has it."""
        now = self._now()
        with self._writing:
            for category, delta in deltas:
                self._counted[_NUMBER[category]] += delta
                if delta:
                    self._write_record(now, _NUMBER[category], delta)

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """Count a storage of the ledger that was resized in place at its new size."""
        entry = self._entries.get(storage._cdata)
        if entry is not None and entry.nbytes != storage.nbytes():
            before, entry.nbytes = entry.nbytes, storage.nbytes()
            self._change((entry.category, entry.nbytes - before))

    def be_quiet(self) -> None:
        """Write no changes from now on."""
        self._quiet = True

    def be_awake(self) -> None:
        """Write changes again, first those of the quiet time."""
        if self._quiet:
            self._quiet = False
            self.set_levels(dict(zip(CATEGORIES, self._counted, strict=True)))

    def forget(self) -> None:
        """Forget all storages, so that they can be counted anew; the ledger has to be quiet."""
        self._entries.clear()
        self._counted = [0] * len(CATEGORIES)

    def set_levels(self, levels: dict[str, int]) -> None:
        """Write the changes from `held` to these bytes by category; decreases first, so that no false peak appears."""
        now, deltas = self._now(), [(_NUMBER[name], levels[name] - self.held[name]) for name in levels]
        with self._writing:
            for category, delta in sorted(deltas, key=lambda change: change[1]):
                if delta:
                    self._write_record(now, category, delta)

    def write_all(self, values: list[int], sums: dict[str, int]) -> None:
        """Write records at once: time, ops begun before, category and bytes of each, and their `sums` by category."""
        file, count = self._file, len(values) // 4
        while file.count + count > file.capacity:
            if not file.grow():
                return
        struct.pack_into("<" + count * "qIB3xq", file.map, _FIRST + _SIZE * file.count, *values)
        file.publish(file.count + count)
        for name, nbytes in sums.items():
            self.held[name] += nbytes

    def _change(self, *deltas: tuple[int, int]) -> None:
        # The garbage collector, and so a release, may run even within this function. So nothing waits for the lock: a
        # call that finds it taken queues the change, and the call that holds it checks the queue after releasing it.
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
        self._counted[category] += delta
        if not self._quiet:
            if self.captured is not None:
                self.captured.append((self._ops.count, now, category, delta))
            self._write_record(now, category, delta)

    def _write_record(self, now: int, category: int, delta: int) -> None:
        self.held[CATEGORIES[category]] += delta
        file = self._file
        index = file.count
        if index < file.capacity or file.grow():
            _PACK(file.map, _FIRST + _SIZE * index, now, self._ops.count, category, delta)
            file.publish(index + 1)

    def _find(
        self, tensor: torch.Tensor, category: int, *, passing: bool = False
    ) -> tuple[_Entry | None, bool]:
        """Return the entry of the tensor's storage, and whether it is new; (None, False) if it does not count.

        A storage that was only noticed so far is new when it is tracked.
        """
        if self.on_use is not None:
            self.on_use()
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
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._change((entry.category, -entry.nbytes))


def _number(category: str) -> int:
    number = _NUMBER.get(category)
    if number is None:
        raise ValueError(f"memory has the categories {', '.join(CATEGORIES)}, and none called {category!r}")
    return number

"""The store through which ranks find each other: a file in the run's folder that no other user can read or write.

torch's `FileStore` polls for a missing key every 10 ms, so each rank of a launch would wait that long for the others.
`RunStore` polls often at first and then less and less often. (torch's usual TCP store accepts connections from every
local user.)
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

__all__ = ["RunStore", "store_of"]

FIRST_PAUSE, LONGEST_PAUSE = 0.0002, 0.01
"""Seconds between two polls for a key."""


def store_of(folder: Path, ranks: int, backend: str) -> Any:
    """Open the store of a run.

    Args:
        folder: the run's folder, of mode 0700.
        ranks: the number of ranks that share it.
        backend: "gloo", or "nccl", whose threads query without Python's lock and so need torch's own store.
    """
    store = FileStore(str(folder / "store"), ranks)
    return store if backend == "nccl" else RunStore(store)


class RunStore(Store):
    """A `FileStore` that polls with short pauses. It waits without limit: the launcher reports hangs."""

    def __init__(self, file: FileStore) -> None:
        super().__init__()
        self._file = file

    def set(self, key: str, value: str) -> None:
        """Write `value` under `key`."""
        self._file.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until `key` has a value and return it."""
        self.wait([key])
        return bytes(self._file.get(key))

    def add(self, key: str, amount: int) -> int:
        """Add to the integer under `key`, 0 at first, and return the sum."""
        return int(self._file.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._file.check(keys))

    def delete_key(self, key: str) -> bool:
        """Delete `key` and return whether it had a value."""
        return bool(self._file.delete_key(key))

    def num_keys(self) -> int:
        """Return the number of keys that have values."""
        return int(self._file.num_keys())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        pause = FIRST_PAUSE
        while not self._file.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

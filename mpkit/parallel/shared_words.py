"""64-bit words in a memory-mapped file that several ranks write and read at once.

Each word has one writer. It is written and read in one piece, so a reader sees the old value or the new one; 0 is a
word that nobody has written yet. The file only grows, and whoever needs more of it first makes the room.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from mpkit.record.files import claim

__all__ = ["SharedWords"]


class SharedWords:
    """The words of one file, made by whoever opens it first.

    Args:
        path: of the file.
        count: words to make room for.

    Attributes:
        words: all that this process has mapped so far; another view after `hold`.

    Raises:
        OSError: the disk has no room for them.
    """

    words: memoryview

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._map(count)

    def hold(self, count: int) -> None:
        """Map at least `count` words."""
        if count > len(self.words):
            self._map(max(count, 2 * len(self.words)))

    def _map(self, count: int) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = os.fstat(file).st_size
            if size < 8 * count:
                size = 8 * count
                claim(file, size)
            self.words = memoryview(mmap.mmap(file, size)).cast("Q")
            fcntl.flock(file, fcntl.LOCK_UN)  # the mapping keeps the file open, and would keep the lock
        finally:
            os.close(file)

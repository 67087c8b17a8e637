"""64-bit words in a memory-mapped file that several ranks write and read concurrently.

Each word has one writer. Words are written and read atomically, so a reader sees either the old value or the new one;
0 means that the word has not been written yet. The file only grows: the first rank that needs more of it extends it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from mpkit.common.private import NO_LINK
from mpkit.trace.record.files import claim

__all__ = ["SharedWords"]


class SharedWords:
    """The words of one file, which the first rank to open it creates.

    Args:
        path: the file.
        count: the number of words to make room for.

    Attributes:
        words: all words that this process has mapped so far; `hold` may replace the view.

    Raises:
        OSError: the disk has no room for the words.
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
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = os.fstat(file).st_size
            if size < 8 * count:
                size = 8 * count
                claim(file, size)
            self.words = memoryview(mmap.mmap(file, size)).cast("Q")
            fcntl.flock(file, fcntl.LOCK_UN)  # the mapping keeps the file open, and with it the lock
        finally:
            os.close(file)

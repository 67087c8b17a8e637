"""What ranks publish about their calls, in files that all of them map into memory.

Table    the collectives of a group: one row per collective, with one word per member
Log      the messages of a rank: three words per message

Both consist of 64-bit words. Each word has one writer. Words are written and read atomically, so a reader sees either
the old value or the new one; 0 means that the word has not been written yet. The file only grows: the first rank that
needs more of it extends it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from mpkit.common.disk import NO_LINK
from mpkit.trace.record.files import claim

__all__ = ["CallTable", "Log", "SharedWords"]


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


class CallTable:
    """The collectives of a group.

    Args:
        path: the file that the members share.
        ranks: the members of the group.
        rank: this rank.

    Attributes:
        name: the group's name, as the trace spells it.
        size: the number of members, which is also the number of words per row.
    """

    def __init__(self, path: Path, ranks: tuple[int, ...], rank: int) -> None:
        self.name = ",".join(map(str, ranks))
        self.ranks = ranks
        self.size = len(ranks)
        self._column = ranks.index(rank)
        self._shared = SharedWords(path, 512 * self.size)

    def publish(self, number: int, word: int) -> None:
        """Write this rank's word of a row."""
        first = number * self.size
        if first + self.size > len(self._shared.words):
            self._shared.hold(first + self.size)
        self._shared.words[first + self._column] = word

    def row(self, number: int) -> memoryview:
        """Return the words of all members, with 0 for those that have not reached the call.

        This rank must have published its own word of that row first.
        """
        first = number * self.size
        return self._shared.words[first : first + self.size]


class Log:
    """The messages of one rank, to and from all other ranks, in the order in which it issued them.

    A message has three words: the peer, the direction and the tag (`key`); its number under that key; its fingerprint.
    The first word of the file counts the messages.
    """

    def __init__(self, path: Path) -> None:
        self._shared = SharedWords(path, 1 + 3 * 512)
        self._count = 0  # messages written, or read, so far

    def publish(self, key: int, number: int, word: int) -> None:
        """Write one message; only the rank whose log it is calls this."""
        at = 1 + 3 * self._count
        self._shared.hold(at + 3)
        words = self._shared.words
        words[at], words[at + 1], words[at + 2] = key, number, word
        self._count += 1
        words[0] = self._count  # written last, so that every message it counts is complete

    def news(self) -> memoryview:
        """Return the words of the messages published since the last call; the other ranks call this."""
        count = self._shared.words[0]
        first, last = 1 + 3 * self._count, 1 + 3 * count
        self._shared.hold(last)
        self._count = count
        return self._shared.words[first:last]

"""What ranks publish of their calls, in files that all of them map into their memory.

Table    the collectives of a group: a row for each, in which every member has a word
Log      the messages of a rank: three words for each
"""

from __future__ import annotations

from pathlib import Path

from mpkit.parallel.shared_words import SharedWords

__all__ = ["Log", "Table"]


class Table:
    """The collectives of a group.

    Args:
        path: of the file that the members share.
        ranks: of the group.
        rank: this one.

    Attributes:
        name: of the group, as the trace spells it.
        size: how many members, and so words in a row.
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
        """The words of all members, 0 of those that have not come to it; for a row that this rank has published."""
        first = number * self.size
        return self._shared.words[first : first + self.size]


class Log:
    """The messages of one rank, to and from whomever, in the order in which it issued them.

    A message has three words: who is at the other end, the direction and the tag (`key`); its number among those;
    its fingerprint. The first word of the file counts the messages.
    """

    def __init__(self, path: Path) -> None:
        self._shared = SharedWords(path, 1 + 3 * 512)
        self._count = 0  # written, or read so far

    def publish(self, key: int, number: int, word: int) -> None:
        """Write one; for the rank whose log it is."""
        at = 1 + 3 * self._count
        self._shared.hold(at + 3)
        words = self._shared.words
        words[at], words[at + 1], words[at + 2] = key, number, word
        self._count += 1
        words[0] = self._count  # last: what it counts is whole

    def news(self) -> memoryview:
        """The words of what was published since the last call; for the others."""
        count = self._shared.words[0]
        first, last = 1 + 3 * self._count, 1 + 3 * count
        self._shared.hold(last)
        self._count = count
        return self._shared.words[first:last]

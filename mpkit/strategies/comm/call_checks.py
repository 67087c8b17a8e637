"""Check that the calls of a group's ranks match. Each rank publishes its own calls and reads its peers'.

    issue       publish the call's fingerprint, then compare it with those already published
    wait        compare once more before returning data

When calls do not match, the last rank to publish sees the others' fingerprints and raises before it starts its own
call. The other ranks therefore never receive data, and no backend meets mismatched sizes, at which it might abort.
Nothing is sent: all ranks map files into memory that hold a table of (collectives) x (members of the group), and of
(messages) x (sender, receiver) for each tag. Its entries are 64-bit words, each with one writer, which are written and
read atomically; 0 is a word not yet written. The first rank that needs more of a file extends it.

After a mismatch, the calls and their source lines are read from the ranks' traces.

A fingerprint has what all ranks of a call must agree on, as one word for comparison and a text for display:

    all_reduce               kind, dtype, shape, reduction
    broadcast, reduce, ...   kind, dtype, shape, root
    all_to_all, uneven       kind, dtype, shape but for the number of rows; that of each pair of ranks
    of plain torch           the group too, as there may be several of the same ranks
    a message                dtype, shape

The word is a 64-bit hash without a zero byte, so that unwritten words can be recognized within a row. Two different
calls have the same word with a probability of 1 in 10^17.

Source of the idea: torch.distributed's ProcessGroupWrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL), which exchanges such
fingerprints through a process group of its own before each collective.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from mpkit.common.disk import NO_LINK
from mpkit.errors import CommMismatch
from mpkit.trace import Kind, read_rank
from mpkit.trace.mismatch import find_issued, why_not
from mpkit.trace.record.files import claim


class Fingerprint(NamedTuple):
    """The fingerprint of a call."""

    word: int  # equal on two ranks if and only if their calls match
    text: str  # 'float32[2, 3], op="sum"'; the trace keeps it as the op's name


@lru_cache(4096)
def fingerprint(
    kind: int, dtype: torch.dtype, shape: torch.Size, root: int = -1, reduction: str = "", group: str = ""
) -> Fingerprint:
    """Return the fingerprint of a call; for both ends of a message, `kind` is `Kind.SEND`."""
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)}".replace("[-1", "[any")
    if reduction:
        text += f', op="{reduction}"'
    if group:
        text += f', group="{group}"'
    return fingerprint_of(kind, text, root)


def fingerprint_of(kind: int, text: str, root: int = -1) -> Fingerprint:
    """Return the fingerprint of a call whose `text` describes everything but its kind and root."""
    digest = blake2b(f"{Kind(kind).word} {root} {text}".encode(), digest_size=8).digest()
    return Fingerprint(int.from_bytes(digest.replace(b"\0", b"\1"), "little"), text)


# ---- files --------------------------------------------------------------------------------------------------


class CallTable:
    """The collectives of a group, or a channel's messages: a row per call, and a column for each of these ranks."""

    def __init__(self, path: Path, ranks: tuple[int, ...], rank: int) -> None:
        self.ranks, self._size, self._column = ranks, len(ranks), ranks.index(rank)
        self._path = path
        self._map(256 * self._size)

    def _map(self, count: int) -> None:
        """Map the file, with room for so many words."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = os.fstat(file).st_size
            if size < 8 * count:
                size = 8 * count
                claim(file, size)
            self._words = memoryview(mmap.mmap(file, size)).cast("Q")
            fcntl.flock(file, fcntl.LOCK_UN)  # the mapping keeps the file open, and with it the lock
        finally:
            os.close(file)

    def publish(self, number: int, word: int) -> None:
        """Write this rank's word of a row."""
        first = number * self._size
        if first + self._size > len(self._words):
            self._map(max(first + self._size, 2 * len(self._words)))
        self._words[first + self._column] = word

    def row(self, number: int) -> memoryview:
        """Return all ranks' words of a row that this rank has published, 0 for those that have not reached it."""
        first = number * self._size
        return self._words[first : first + self._size]


# ---- calls --------------------------------------------------------------------------------------------------


UNWRITTEN = bytes(8)
NO_ROWS: Mapping[tuple[int, int], int] = MappingProxyType({})
MOST_TABLES = 10_000
"""Each table is a mapped file, so messages with further tags are not compared."""


class CheckedCall:
    """One call of this rank: words that must equal those of its peers, in the same rows of their tables."""

    __slots__ = ("_checks", "_group", "_number", "_words", "text")

    def __init__(
        self, checks: CallChecks, group: str, number: int, text: str, words: Sequence[tuple[CallTable, int]]
    ) -> None:
        self._checks, self._group, self._number, self.text, self._words = checks, group, number, text, words

    def publish(self) -> None:
        """Publish the call, and compare it with those that the peers have published so far."""
        for table, word in self._words:
            table.publish(self._number, word)
        self.compare()

    def compare(self) -> None:
        """Compare the call with those that the peers have published so far."""
        for table, word in self._words:
            row, mine = table.row(self._number).tobytes(), word.to_bytes(8, sys.byteorder)
            size = len(table.ranks)
            if row != mine * size and row.count(mine) + row.count(UNWRITTEN) != size:
                for rank, other in zip(table.ranks, table.row(self._number), strict=True):
                    if other not in (0, word):
                        self._checks.refuse(self._group, self._number, rank)


class CallChecks:
    """One rank's calls and its view of its peers' calls."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self.rank = folder, rank
        self._tables: dict[str, CallTable] = {}

    def collective(
        self, ranks: tuple[int, ...], number: int, kind: int, tensor: Tensor, root: int, reduction: str,
        group: str = "", *, what: str = "",
    ) -> CheckedCall:  # fmt: skip
        """Return the check of these ranks' collective; `what` names the parameters of which they pass parts."""
        found = fingerprint(kind, tensor.dtype, tensor.shape, root, reduction, what or group)
        text = "" if what else found.text  # the trace has the layer there
        return self._call(",".join(map(str, ranks)), ranks, number, found._replace(text=text))

    def exchange(
        self, ranks: tuple[int, ...], number: int, tensor: Tensor, sends: Sequence[int], receives: Sequence[int],
        group: str = "",
    ) -> CheckedCall:  # fmt: skip
        """Return the check of an all-to-all of uneven parts."""
        name, shape = ",".join(map(str, ranks)), torch.Size((-1, *tensor.shape[1:]))
        found = fingerprint(Kind.ALL_TO_ALL, tensor.dtype, shape, group=group)
        rows = {}  # by sender and receiver, like messages
        for peer, to, of in zip(ranks, sends, receives, strict=True):
            if peer != self.rank:
                rows[self.rank, peer], rows[peer, self.rank] = to + 1, of + 1
        return self._call(name, ranks, number, found, rows)

    def group(self, world: tuple[int, ...], number: int, ranks: tuple[int, ...]) -> CheckedCall:
        """Return the check of the creation of a group, which is one of the collectives of all ranks."""
        name = ",".join(map(str, world))
        return self._call(name, world, number, fingerprint_of(Kind.WAIT, str(list(ranks))))

    def message(self, channel: str, number: int, ends: tuple[int, int], tensor: Tensor) -> CheckedCall | None:
        """Return the check of one end of a message between `ends`, the sender and the receiver."""
        if len(self._tables) >= MOST_TABLES and channel not in self._tables:
            return None
        return self._call(channel, ends, number, fingerprint(Kind.SEND, tensor.dtype, tensor.shape))

    def refuse(self, group: str, number: int, other: int) -> None:
        """Raise the error that a call of this rank does not match a call of another rank."""
        mine, theirs = (
            find_issued(rank, read_rank(self._folder, rank), group, number) for rank in (self.rank, other)
        )
        text = (
            f"rank {self.rank} and rank {other} do not fit each other in communication number {number} of "
            f"{group}; recording had stopped before (a full disk?), so that the lines are not known"
        )
        if mine is not None and theirs is not None:
            text = why_not(mine, theirs)
        raise CommMismatch(text, rank=self.rank, other=other)

    def _call(
        self, name: str, ranks: tuple[int, ...], number: int, found: Fingerprint,
        rows: Mapping[tuple[int, int], int] = NO_ROWS,
    ) -> CheckedCall:  # fmt: skip
        words = [(self._table(name, ranks), found.word)]
        words += [(self._table(f"rows {ends} of {name}", ends), word) for ends, word in rows.items()]
        return CheckedCall(self, name, number, found.text, words)

    def _table(self, name: str, ranks: tuple[int, ...]) -> CallTable:
        if name not in self._tables:
            file = blake2b(name.encode(), digest_size=8).hexdigest()
            self._tables[name] = CallTable(self._folder / f"calls.{file}", ranks, self.rank)
        return self._tables[name]

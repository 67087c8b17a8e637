"""Check that the calls of a group's ranks match. Each rank publishes its own calls and reads its peers'.

    issue       publish the call's fingerprint, then compare it with those already published
    wait        compare once more before returning data

When calls do not match, the last rank to publish sees the others' fingerprints and raises before it starts its own
call. The other ranks therefore never receive data, and no backend meets mismatched sizes, at which it might abort.
Nothing is sent: fingerprints are stored in files that all ranks map into memory, as a table of (collectives) x (members
of the group) and as one log of messages per rank. Both consist of 64-bit words, each with one writer. Words are written
and read atomically, so a reader sees either the old value or the new one; 0 means that the word has not been written.
The file only grows: the first rank that needs more of it extends it.

After a mismatch, the calls and their source lines are read from the ranks' traces.

Fingerprints: what all ranks of a call must agree on, as one word for comparison and a text for display.

    all_reduce               kind, dtype, shape, reduction
    broadcast, reduce, ...   kind, dtype, shape, root
    all_to_all, uneven       kind, dtype, shape but for the number of rows
    of plain torch           the group too, as there may be several of the same ranks
    a message                dtype, shape

The word is a 64-bit hash without a zero byte, so that words not yet written can be recognized within a row. Two
different calls have the same word with a probability of 1 in 10^17.

Source of the idea: torch.distributed's ProcessGroupWrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL), which exchanges such
fingerprints through a process group of its own before each collective.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Protocol
from zlib import crc32

import torch
from torch import Tensor

from mpkit.common.disk import NO_LINK
from mpkit.errors import CommMismatch
from mpkit.strategies.comm.arguments import tag_number
from mpkit.trace import Kind, read_rank
from mpkit.trace.mismatch import find_issued, why_not
from mpkit.trace.record.files import claim

__all__ = ["CallChecks", "CheckedCall", "Fingerprint", "Fingerprints"]


class Fingerprint(NamedTuple):
    """The fingerprint of a call.

    Attributes:
        word: equal on two ranks if and only if their calls match.
        text: dtype, shape, reduction, and the group's name where there may be several of the same ranks, such as
            'float32[2, 3], op="sum"'; the trace keeps it as the op's name.
    """

    word: int
    text: str


class Fingerprints:
    """The fingerprints of one rank's calls, each computed once.

    >>> fingerprint = Fingerprints().look_up
    >>> fingerprint(Kind.ALL_REDUCE, torch.float32, torch.Size([2, 3]), -1, "sum").text
    'float32[2, 3], op="sum"'
    >>> zero, one = (fingerprint(Kind.BROADCAST, torch.int64, torch.Size([]), root) for root in (0, 1))
    >>> zero == one
    False
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.dtype, torch.Size, int, str, str], Fingerprint] = {}

    def look_up(
        self, kind: int, dtype: torch.dtype, shape: torch.Size, root: int = -1, reduction: str = "", group: str = ""
    ) -> Fingerprint:  # fmt: skip
        """Return the fingerprint of a call; for both ends of a message, `kind` is `Kind.SEND`."""
        key = kind, dtype, shape, root, reduction, group
        found = self._known.get(key)
        if found is None:
            text = f"{str(dtype).removeprefix('torch.')}{list(shape)}".replace("[-1", "[any")
            if reduction:
                text += f', op="{reduction}"'
            if group:
                text += f', group="{group}"'
            found = self._known[key] = fingerprint_of(kind, text, root)
        return found


def fingerprint_of(kind: int, text: str, root: int = -1) -> Fingerprint:
    """Return the fingerprint of a call whose `text` describes everything but its kind and root."""
    digest = blake2b(f"{Kind(kind).word} {root} {text}".encode(), digest_size=8).digest()
    return Fingerprint(int.from_bytes(digest.replace(b"\0", b"\1"), "little"), text)


# ---- files --------------------------------------------------------------------------------------------------


class SharedWords:
    """The words of one file, which the first rank to open it creates.

    Attributes:
        words: all words that this process has mapped so far; `hold` may replace the view.
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


# ---- calls --------------------------------------------------------------------------------------------------


UNWRITTEN = bytes(8)


class CheckedCall(Protocol):
    """One call of this rank, which is compared with its peers' calls.

    Attributes:
        text: the arguments of the call; see `Fingerprint`.
    """

    text: str

    def publish(self) -> None:
        """Publish the call to the peers and compare it with what they have published so far."""

    def compare(self) -> None:
        """Compare the call once more with what the peers have published since."""


class Collective:
    """A collective: a word in this rank's column that must equal all other words of its row."""

    __slots__ = ("_checks", "_number", "_table", "_word", "text")

    def __init__(self, checks: CallChecks, table: CallTable, number: int, fingerprint: Fingerprint) -> None:
        self._checks, self._table, self._number = checks, table, number
        self._word, self.text = fingerprint

    def publish(self) -> None:
        self._table.publish(self._number, self._word)
        self.compare()

    def compare(self) -> None:
        table = self._table
        row = table.row(self._number).tobytes()
        mine = self._word.to_bytes(8, sys.byteorder)
        if row != mine * table.size and row.count(mine) + row.count(UNWRITTEN) != table.size:
            for rank, word in zip(table.ranks, table.row(self._number), strict=True):
                if word not in (0, self._word):
                    self._checks.refuse(table.name, self._number, rank)


class Peer:
    """The messages between this rank and another one for which only one end has been published.

    Attributes:
        log: the other rank's log of messages.
        mine: fingerprint and channel of this rank's ends, by (tag with direction, number).
        theirs: fingerprints of the other rank's ends, by the same keys.
    """

    def __init__(self, path: Path) -> None:
        self.log = Log(path)
        self.mine: dict[tuple[int, int], tuple[int, str]] = {}
        self.theirs: dict[tuple[int, int], int] = {}


SENT = 1 << 32
"""Bit that marks the tag of an outgoing message."""
ROWS = 1 << 34
"""Bit that marks the numbers of rows of an all-to-all among messages; below it is a hash of the group's name."""


class MessageEnd:
    """One end of a message."""

    __slots__ = ("_channel", "_checks", "_key", "_number", "_peer", "_word", "text")

    def __init__(
        self, checks: CallChecks, key: int, peer: int, channel: str, number: int, fingerprint: Fingerprint
    ) -> None:
        self._checks, self._key, self._peer, self._channel, self._number = checks, key, peer, channel, number
        self._word, self.text = fingerprint

    def publish(self) -> None:
        checks, key, number = self._checks, self._key, self._number
        checks.log.publish(self._peer | key << 16, number, self._word)
        peer = checks.peer(self._peer)
        word = peer.theirs.pop((key, number), None)
        if word is None:
            peer.mine[key, number] = self._word, self._channel
            self.compare()
        elif word != self._word:
            checks.refuse(self._channel, number, self._peer)

    def compare(self) -> None:
        checks, peer = self._checks, self._checks.peer(self._peer)
        if (self._key, self._number) not in peer.mine:
            return
        news = peer.log.news()
        for at in range(0, len(news), 3):
            if news[at] & 0xFFFF != checks.rank:
                continue
            key, number = (news[at] >> 16) ^ SENT, news[at + 1]  # as this end spells them
            mine = peer.mine.pop((key, number), None)
            if mine is None:
                peer.theirs[key, number] = news[at + 2]
            elif mine[0] != news[at + 2]:
                checks.refuse(mine[1], number, self._peer)


class UnevenExchange:
    """An all-to-all of uneven parts: a collective, and for each other rank how many rows go there and come from it."""

    __slots__ = ("_ends", "text")

    def __init__(self, collective: CheckedCall, rows: Sequence[MessageEnd]) -> None:
        self._ends = (collective, *rows)
        self.text = collective.text

    def publish(self) -> None:
        for end in self._ends:
            end.publish()

    def compare(self) -> None:
        for end in self._ends:
            end.compare()


class CallChecks:
    """One rank's calls and its view of its peers' calls."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self.rank = folder, rank
        self._fingerprints = Fingerprints()
        self._tables: dict[tuple[int, ...], CallTable] = {}
        self._peers: dict[int, Peer] = {}
        self._log: Log | None = None

    def collective(
        self, ranks: tuple[int, ...], number: int, kind: int, tensor: Tensor, root: int, reduction: str,
        group: str = "", *, uneven: bool = False, what: str = "",
    ) -> CheckedCall:  # fmt: skip
        """Return the check of collective number `number` of these ranks; `group` tells several groups of them apart.

        Members of an `uneven` one may pass different numbers of rows. `what`: the parameters of which they pass parts.
        """
        shape = torch.Size((-1, *tensor.shape[1:])) if uneven else tensor.shape
        fingerprint = self._fingerprints.look_up(kind, tensor.dtype, shape, root, reduction, what or group)
        fingerprint = fingerprint._replace(text="") if what else fingerprint  # the trace has the layer there
        return Collective(self, self._table(ranks), number, fingerprint)

    def exchange(
        self,
        ranks: tuple[int, ...],
        number: int,
        tensor: Tensor,
        sends: Sequence[int],
        receives: Sequence[int],
        group: str = "",
    ) -> CheckedCall:
        """Return the check of an all-to-all with so many rows for each of these ranks, and from each."""
        name = ",".join(map(str, ranks))
        channel = ROWS | crc32(name.encode())
        whole = self.collective(ranks, number, Kind.ALL_TO_ALL, tensor, -1, "", group, uneven=True)
        rows = [
            MessageEnd(self, channel | direction, peer, name, number, Fingerprint(count + 1, ""))
            for direction, counts in ((SENT, sends), (0, receives))
            for peer, count in zip(ranks, counts, strict=True)
            if peer != self.rank
        ]
        return UnevenExchange(whole, rows)

    def group(self, world: tuple[int, ...], number: int, ranks: tuple[int, ...]) -> CheckedCall:
        """Return the check of creating a group of these ranks.

        Creating a group takes a number among the collectives of all ranks.
        """
        return Collective(self, self._table(world), number, fingerprint_of(Kind.WAIT, str(list(ranks))))

    def message(
        self, kind: int, channel: str, number: int, peer: int, tag: int | str, tensor: Tensor
    ) -> CheckedCall:
        """Return the check of one end of a message to or from `peer`."""
        key = tag_number(tag) | (SENT if kind == Kind.SEND else 0)
        fingerprint = self._fingerprints.look_up(Kind.SEND, tensor.dtype, tensor.shape)
        return MessageEnd(self, key, peer, channel, number, fingerprint)

    @property
    def log(self) -> Log:
        """This rank's own messages."""
        if self._log is None:
            self._log = Log(self._folder / f"rank{self.rank}.messages")
        return self._log

    def peer(self, rank: int) -> Peer:
        """Return the record of messages between this rank and another one."""
        found = self._peers.get(rank)
        if found is None:
            found = self._peers[rank] = Peer(self._folder / f"rank{rank}.messages")
        return found

    def refuse(self, group: str, number: int, other: int) -> None:
        """Raise the error that a call of this rank does not match a call of another rank."""
        mine, theirs = (
            find_issued(rank, read_rank(self._folder, rank), group, number) for rank in (self.rank, other)
        )
        if mine is None or theirs is None:
            text = (
                f"rank {self.rank} and rank {other} do not fit each other in communication number {number} of "
                f"{group}; recording had stopped before (a full disk?), so that the lines are not known"
            )
        else:
            text = why_not(mine, theirs)
        raise CommMismatch(text, rank=self.rank, other=other)

    def _table(self, ranks: tuple[int, ...]) -> CallTable:
        found = self._tables.get(ranks)
        if found is None:
            name = blake2b(",".join(map(str, ranks)).encode(), digest_size=8).hexdigest()
            found = self._tables[ranks] = CallTable(self._folder / f"calls.{name}", ranks, self.rank)
        return found

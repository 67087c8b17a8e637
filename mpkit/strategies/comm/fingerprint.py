"""Fingerprints: what all ranks of a call must agree on, as one word for comparison and a text for display.

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

from hashlib import blake2b
from typing import NamedTuple

import torch

from mpkit.trace import Kind

__all__ = ["Fingerprint", "Fingerprints"]


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

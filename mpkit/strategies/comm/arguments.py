"""Checks of a communication's arguments; each error says what would fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from mpkit.strategies.comm.communicator import Communicator
    from mpkit.strategies.comm.wire import Wire


Parts = tuple[list[int], list[int]]
"""The number of rows for each member of an all-to-all, and from each."""


def root_of(comm: Communicator, number: int, what: str) -> int:
    """Return a root's global rank."""
    if not 0 <= number < comm.size:
        raise ValueError(f"{what}: there is no rank {number}: roots are numbered from 0 to {comm.size - 1}")
    return comm.ranks[number]


def peer_of(comm: Communicator, number: int, what: str) -> int:
    """Return the global rank of the other end of a message."""
    if number == comm.index:
        raise ValueError(f"rank {number}: {what} with rank {number}: that is this rank itself")
    if not 0 <= number < comm.size:
        raise ValueError(
            f"rank {comm.index}: {what} with rank {number}: there are ranks 0 to {comm.size - 1}"
        )
    return comm.ranks[number]


def check_reducible(tensor: Tensor, op: str) -> None:
    """Reject a mean of integers, which have no room for fractions."""
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f'all_reduce(op="mean") of {tensor.dtype}: the mean is written into the tensor itself, which holds '
            'integers only. Give tensor.float(), or op="sum" and divide: ctx.comm.all_reduce(tensor) // ctx.world_size'
        )


def part_shape(group: Communicator, tensor: Tensor, what: str) -> tuple[int, ...]:
    """Return the shape of one of n equal parts of the first dimension."""
    if tensor.dim() == 0 or tensor.shape[0] % group.size:
        raise ValueError(
            f"{what} cuts the first dimension into {group.size} equal parts, one per rank, which a tensor of "
            f"shape {tuple(tensor.shape)} does not allow: pad it to a multiple of {group.size}"
        )
    return (tensor.shape[0] // group.size, *tensor.shape[1:])


def uneven_parts(
    group: Communicator, tensor: Tensor, sends: Sequence[int] | None, receives: Sequence[int] | None
) -> Parts | None:
    """Return the checked sizes of an all-to-all's parts; None if they are equal."""
    if sends is None and receives is None:
        return None
    n, rows = group.size, tensor.shape[0] if tensor.dim() else 0
    if sends is None or receives is None or not len(sends) == len(receives) == n or sum(sends) != rows:
        raise ValueError(
            f"all_to_all(sends={sends and list(sends)}, receives={receives and list(receives)}) of {rows} rows among "
            f"{n} ranks: sends has how many rows go to each of them, {rows} together, and receives how many come from "
            f"each. Ranks know the latter from ctx.comm.all_to_all(torch.tensor(sends)).tolist()"
        )
    return list(sends), list(receives)


def output_tensor(wire: Wire, out: Tensor | None, shape: tuple[int, ...], like: Tensor, what: str) -> Tensor:
    """Return the tensor that the backend fills: `out`, if it is given and the backend can."""
    if out is None or wire.staged:
        return wire.make_buffer(shape, like)
    if tuple(out.shape) != shape or out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(
            f"{what}(out=...) fills a contiguous tensor of shape {shape} and {like.dtype}; this one has shape "
            f"{tuple(out.shape)}, {out.dtype} and strides {out.stride()}: torch.empty({shape}, dtype={like.dtype})"
        )
    return out.detach()


LIMIT = 1_000_000  # the integers of tags are below it


@lru_cache(4096)
def tag_number(tag: int | str) -> int:
    """Return the integer that backends use for a tag; different tags have different integers.

    >>> tag_number(7), tag_number("A7"), tag_number("F3")
    (7, 1000007, 6000003)

    Raises:
        ValueError: the tag is neither an integer from 0 to 999,999 nor a capital letter followed by one.
    """
    letter, number = "", tag
    if isinstance(tag, str):
        match = re.fullmatch(r"([A-Z]?)(\d{1,6})", tag)
        if match is None:
            raise ValueError(
                f"tag={tag!r}: a tag is an integer, or a capital letter and an integer, such as 'F3'"
            )
        letter, number = match[1], int(match[2])
    assert isinstance(number, int)
    if not 0 <= number < LIMIT:
        raise ValueError(f"tag={tag!r}: the integer of a tag goes from 0 to {LIMIT - 1:,}")
    return (ord(letter) - ord("A") + 1) * LIMIT + number if letter else number

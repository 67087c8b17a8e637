"""Messages from one rank to another, which are matched by a tag.

Both ends know a message by its channel (sender, receiver and tag: "0>4#F3") and by its number in that channel.

These functions are methods of `Communicator`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from mpkit.strategies.comm.arguments import peer, tag_number
from mpkit.strategies.comm.wire import CallNumber, Wire, Work
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.comm.communicator import Communicator

__all__ = ["irecv", "isend", "recv", "send"]


def isend(self: Communicator, tensor: Tensor, dst: int, tag: int | str = 0) -> Work:
    """Start sending `tensor` to rank `dst`; it must not be changed before `wait()`.

    Args:
        tensor: any shape; the receiver's buffer has the same.
        dst: the receiving rank.
        tag: an integer, or a letter and an integer such as "F3"; the matching `irecv` must use the same tag.
    """
    other = peer(self, dst, "isend")
    numbered = _next_message(self.wire, Kind.SEND, other, tag, tensor)
    sent = self.wire.prepare_send(tensor)
    start = partial(dist.isend, sent, other, tag=tag_number(tag))
    return self.wire.issue(numbered, tensor.nbytes, start, lambda: tensor)


def irecv(self: Communicator, buffer: Tensor, src: int, tag: int | str = 0) -> Work:
    """Start receiving from rank `src` into `buffer`; `wait()` returns the filled buffer."""
    other = peer(self, src, "irecv")
    if not buffer.is_contiguous():
        raise ValueError(
            f"irecv needs a contiguous buffer, not one of strides {buffer.stride()}: torch.empty"
        )
    numbered = _next_message(self.wire, Kind.RECV, other, tag, buffer)
    filled = self.wire.make_buffer(buffer.shape, buffer) if self.wire.staged else buffer
    start = partial(dist.irecv, filled, other, tag=tag_number(tag))
    return self.wire.issue(numbered, buffer.nbytes, start, partial(self.wire.finish_receive, filled, buffer))


def send(self: Communicator, tensor: Tensor, dst: int, tag: int | str = 0) -> None:
    """Send `tensor` to rank `dst` and wait until it may be changed again."""
    self.isend(tensor, dst, tag).wait()


def recv(self: Communicator, buffer: Tensor, src: int, tag: int | str = 0) -> Tensor:
    """Receive into `buffer` from rank `src` and wait until it is filled."""
    return self.irecv(buffer, src, tag).wait()


def _next_message(wire: Wire, kind: Kind, other: int, tag: int | str, tensor: Tensor) -> CallNumber:
    """Return the next message to or from a global rank, which takes its number in the channel."""
    tag_number(tag)  # raises if the tag is malformed
    src, dst = (wire.rank, other) if kind == Kind.SEND else (other, wire.rank)
    channel = f"{src}>{dst}#{tag}"
    number = wire.messages.get(channel, 0)
    wire.messages[channel] = number + 1
    call = None
    if wire.checks is not None:
        call = wire.checks.message(kind, channel, number, other, tag, tensor)
    return CallNumber(kind, channel, number, other, call)

"""Communicator: the object through which every byte between ranks goes, and which records it.

Each call leaves a communication op in the trace (kind, group, its number in the group, payload, when it was issued
and when it was seen to be complete) and, where the caller waits for it, a WAIT op. Hangs are explained from these ops:
a rank that waits has an open WAIT, and a rank that never made the call has no op of that number.

    wire           recording and staging, which all communication shares
    groups         which ranks communicate
    call_checks    whether their calls match
    collectives    collectives without a root
    rooted         collectives with a root, which sends or receives
    comm           Communicator: all of these, and messages between two ranks
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from mpkit.comm.call_checks import Call, CallChecks
from mpkit.comm.collectives import Collectives
from mpkit.comm.rooted import RootedCollectives
from mpkit.comm.tags import tag_number
from mpkit.comm.wire import Group, Work
from mpkit.record.recorder import Recorder
from mpkit.trace import Kind

__all__ = ["Communicator", "Group", "Work"]


class Communicator(Collectives, RootedCollectives):
    """The type of `ctx.comm`: collectives and messages among the ranks of a run.

    Tensors live on `ctx.device`. Where ranks share a GPU, their backend (gloo) handles host memory only, so tensors are
    staged through host memory and the copies are recorded. Rank arguments are always global ranks.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        record: Recorder,
        device: torch.device,
        backend: str,
        checks: CallChecks | None = None,
    ) -> None:
        super().__init__(rank, world_size, record, device, backend, checks)
        self._messages: dict[str, int] = {}  # messages so far, by "src>dst#tag"

    def isend(self, tensor: Tensor, dst: int, tag: int | str = 0) -> Work:
        """Start sending `tensor` to rank `dst`; it must not be changed before `wait()`.

        Args:
            tensor: any shape; the receiver's buffer has the same.
            dst: the receiving rank.
            tag: an integer, or a letter and an integer such as "F3"; the matching `irecv` must use the same tag.
        """
        self._check_peer(dst, "isend")
        channel, number = self._channel(self.rank, dst, tag)
        wire = self._wire.outgoing(tensor)
        return self._wire.issue(
            Kind.SEND, channel, number, dst, tensor.nbytes,
            lambda: dist.isend(wire, dst, tag=tag_number(tag)), lambda: tensor,
            call=self._message(Kind.SEND, channel, number, dst, tag, tensor),
        )  # fmt: skip

    def irecv(self, buffer: Tensor, src: int, tag: int | str = 0) -> Work:
        """Start receiving from rank `src` into `buffer`; `wait()` returns the filled buffer."""
        self._check_peer(src, "irecv")
        if not buffer.is_contiguous():
            raise ValueError(
                f"irecv needs a contiguous buffer, not one of strides {buffer.stride()}: torch.empty"
            )
        channel, number = self._channel(src, self.rank, tag)
        wire = self._wire.incoming(buffer.shape, buffer) if self._wire.staged else buffer
        return self._wire.issue(
            Kind.RECV, channel, number, src, buffer.nbytes,
            lambda: dist.irecv(wire, src, tag=tag_number(tag)),
            lambda: self._wire.arrived(wire, buffer),
            call=self._message(Kind.RECV, channel, number, src, tag, buffer),
        )  # fmt: skip

    def send(self, tensor: Tensor, dst: int, tag: int | str = 0) -> None:
        """Send `tensor` to rank `dst` and wait until it may be changed again."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, buffer: Tensor, src: int, tag: int | str = 0) -> Tensor:
        """Receive into `buffer` from rank `src` and wait until it is filled."""
        return self.irecv(buffer, src, tag).wait()

    def delays(self, pause: Callable[[], None]) -> None:
        """Call `pause` before each communication from now on.

        The pause belongs to no op, and so does not advance a virtual clock.
        """
        self._wire.before = pause

    def _channel(self, src: int, dst: int, tag: int | str) -> tuple[str, int]:
        """Return the name by which both ends identify a message, and its number under that name."""
        tag_number(tag)  # raises if the tag is malformed
        channel = f"{src}>{dst}#{tag}"
        number = self._messages.get(channel, 0)
        self._messages[channel] = number + 1
        return channel, number

    def _message(
        self, kind: Kind, channel: str, number: int, peer: int, tag: int | str, tensor: Tensor
    ) -> Call | None:
        """Return this end of a message, to be compared with the other end; None if calls are not compared."""
        if self._checks is None:
            return None
        return self._checks.message(kind, channel, number, peer, tag, tensor)

    def _check_peer(self, peer: int, what: str) -> None:
        if peer == self.rank or not 0 <= peer < self.world_size:
            others = f"there are ranks 0 to {self.world_size - 1}"
            why = "that is this rank itself" if peer == self.rank else others
            raise ValueError(f"rank {self.rank}: {what} with rank {peer}: {why}")

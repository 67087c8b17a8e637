"""Every byte between ranks goes through here, and is recorded on the way.

Each call leaves a communication op in the trace (kind, group, its number in the group, payload, when it was issued
and when it was seen to be complete) and, where the caller waits for it, a WAIT op. A hang is explained from
these: whoever waits, waits in an open WAIT, and whoever never came has no op of that number.

    wire           what all communication shares
    groups         which ranks communicate
    call_checks    do their calls fit each other?
    collectives    what a group of ranks does together, all alike
    rooted         the same with a root, which gives or gets
    comm           Comm: all of that, and messages between two ranks
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from mpkit.parallel.call_checks import Call, CallChecks
from mpkit.parallel.collectives import Collectives
from mpkit.parallel.message import tag_number
from mpkit.parallel.rooted import RootedCollectives
from mpkit.parallel.wire import Group, Work
from mpkit.record.recorder import Recorder
from mpkit.trace import Kind

__all__ = ["Comm", "Group", "Work"]


class Comm(Collectives, RootedCollectives):
    """What `ctx.comm` is: collectives and messages among the ranks of a run.

    Tensors live on `ctx.device`. Where ranks share a GPU, whose backend (gloo) only knows host memory, they are
    staged through it, and the copies are recorded. Ranks are global ones everywhere.
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
            dst: the receiver.
            tag: an integer, or a letter and an integer such as "F3"; `irecv` must name the same.
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
        """Start receiving from rank `src` into `buffer`; `wait()` returns it, filled."""
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
        """Send `tensor` to rank `dst`, and wait until it may be changed again."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, buffer: Tensor, src: int, tag: int | str = 0) -> Tensor:
        """Receive into `buffer` from rank `src`, and wait for it."""
        return self.irecv(buffer, src, tag).wait()

    def delays(self, pause: Callable[[], None]) -> None:
        """Call `pause` before each communication from now on; it is in no op, and so on no virtual clock."""
        self._wire.before = pause

    def _channel(self, src: int, dst: int, tag: int | str) -> tuple[str, int]:
        """The name under which both ends know a message, and its number there."""
        tag_number(tag)  # says what is wrong with it
        channel = f"{src}>{dst}#{tag}"
        number = self._messages.get(channel, 0)
        self._messages[channel] = number + 1
        return channel, number

    def _message(
        self, kind: Kind, channel: str, number: int, peer: int, tag: int | str, tensor: Tensor
    ) -> Call | None:
        """This end of a message, to be compared with the other one."""
        if self._checks is None:
            return None
        return self._checks.message(kind, channel, number, peer, tag, tensor)

    def _check_peer(self, peer: int, what: str) -> None:
        if peer == self.rank or not 0 <= peer < self.world_size:
            others = f"there are ranks 0 to {self.world_size - 1}"
            why = "that is this rank itself" if peer == self.rank else others
            raise ValueError(f"rank {self.rank}: {what} with rank {peer}: {why}")

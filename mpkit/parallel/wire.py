"""What all communication shares: it is recorded, it says where it was asked for, it is staged where it must be.

Group   ranks that communicate, and how many collectives they have had
Work    a communication under way
Wire    issue one, record it, bring tensors to where the backend can take them from
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpkit.parallel.call_checks import Call
from mpkit.record.recorder import Recorder
from mpkit.trace import Kind

__all__ = ["Group", "Wire", "Work"]


@dataclass
class Group:
    """Ranks that communicate with each other; made by `Comm.group`.

    Attributes:
        ranks: global ranks, ascending.
        handle: torch's own, None for the world.
        issued: collectives so far, and so the next one's number.
    """

    ranks: tuple[int, ...]
    handle: dist.ProcessGroup | None
    issued: int = 0

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """As the trace spells it: "0,1,2,3"."""
        return ",".join(map(str, self.ranks))


@dataclass
class Work:
    """A communication under way. `wait` blocks until it is complete and returns its result.

    Until then it holds the buffers that are being read or filled.
    """

    _wire: Wire
    _op: int
    _handle: Any
    _result: Callable[[], Tensor]
    _where: str
    _waiting: int = -1
    _call: Call | None = None
    _value: Tensor | None = None

    def wait(self) -> Tensor:
        """Block until complete; returns the result (a receive's buffer, an all-reduce's tensor, ...).

        Raises:
            CommMismatch: what came is of a call that does not fit this one.
        """
        if self._value is None:
            record, waiting = self._wire.record, self._waiting
            if waiting < 0:
                waiting = record.begin(Kind.WAIT, ref=self._op, where=self._where)
            if self._handle is not None:
                self._handle.wait()
            if self._call is not None:
                self._call.compare()
            record.end(waiting)
            record.end(self._op)
            self._value = self._result()
        return self._value


class Wire:
    """One rank's end of all links.

    Attributes:
        staged: tensors live on a GPU and the backend takes only host memory (ranks share a GPU, over gloo).
        before: called before each communication; None: nothing is. (The classroom delays ranks there.)
    """

    def __init__(self, record: Recorder, device: torch.device, backend: str) -> None:
        self.record = record
        self.device = device
        self.staged = device.type == "cuda" and backend == "gloo"
        self.before: Callable[[], None] | None = None
        self._places: dict[tuple[CodeType, int], str] = {}

    def issue(
        self,
        kind: Kind,
        group: str,
        number: int,
        peer: int,
        nbytes: int,
        start: Callable[[], Any],
        result: Callable[[], Tensor],
        *,
        waits: bool = False,
        call: Call | None = None,
    ) -> Work:
        """Record a communication and start it.

        Args:
            kind, group, number, peer, nbytes: as `mpkit.trace.OP` has them.
            start: starts it, returns torch's handle.
            result: once it is complete, what `Work.wait` returns.
            waits: the caller waits for it at once: then starting it is waiting already, and not work that it hides
                behind. (A backend's thread may take the core while it is started.)
            call: to compare with its peers', before it starts and once it is complete; None: it is not.

        Raises:
            CommMismatch: a peer's call does not fit.
        """
        if self.before is not None:
            self.before()
        where = self.where()
        text = "" if call is None else call.text
        op = self.record.begin(kind, text, group=group, number=number, peer=peer, nbytes=nbytes, where=where)
        if call is not None:
            call.publish()
        if not waits:
            return Work(self, op, start(), result, where, -1, call)
        waiting = self.record.begin(Kind.WAIT, ref=op, where=where)
        try:
            handle = start()
        except BaseException:
            self.record.end(waiting)
            raise
        return Work(self, op, handle, result, where, waiting, call)

    def outgoing(self, tensor: Tensor) -> Tensor:
        """`tensor` as the backend can take it: contiguous, without history, in host memory if staged."""
        tensor = tensor.detach()
        if self.staged:
            op = self.record.begin(Kind.COPY_TO_HOST, nbytes=tensor.nbytes)
            tensor = tensor.cpu()
            self.record.end(op)
        return tensor.contiguous()

    def incoming(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """An empty tensor that the backend can fill."""
        return torch.empty(shape, dtype=like.dtype, device="cpu" if self.staged else like.device)

    def arrived(self, wire: Tensor, into: Tensor | None = None) -> Tensor:
        """What the backend filled, on this rank's device; copied `into` a tensor if that is not it already."""
        if into is None:
            if not self.staged:
                return wire
            into = torch.empty(wire.shape, dtype=wire.dtype, device=self.device)
        if into.untyped_storage()._cdata != wire.untyped_storage()._cdata:
            op = self.record.begin(Kind.COPY_TO_DEVICE, nbytes=wire.nbytes) if self.staged else -1
            into.detach().copy_(wire)
            if self.staged:
                self.record.end(op)
        return into

    def where(self) -> str:
        """The line that asked, outside of the files of communication itself."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in _OWN:
            frame = frame.f_back
        if frame is None:
            return ""
        key = (frame.f_code, frame.f_lineno)
        place = self._places.get(key)
        if place is None:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            self._places[key] = place
        return place


_OWN = (__name__, *(f"mpkit.parallel.{name}" for name in ("groups", "collectives", "rooted", "comm")))

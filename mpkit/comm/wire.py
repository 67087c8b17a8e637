"""What all communication shares: recording, the source line of the call, and staging through host memory.

Group   ranks that communicate, and the number of collectives they have issued
Work    a communication in progress
Wire    issues and records communications, and moves tensors to memory that the backend can use
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

from mpkit.comm.call_checks import Call
from mpkit.record.recorder import Recorder
from mpkit.trace import Kind

__all__ = ["Group", "Wire", "Work"]


@dataclass
class Group:
    """Ranks that communicate with each other; created by `Communicator.group`.

    Attributes:
        ranks: global ranks, ascending.
        handle: torch's process group, None for all ranks.
        issued: the number of collectives so far, which is the number of the next one.
    """

    ranks: tuple[int, ...]
    handle: dist.ProcessGroup | None
    issued: int = 0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The name as the trace spells it: "0,1,2,3"."""
        return ",".join(map(str, self.ranks))


@dataclass
class Work:
    """A communication in progress. `wait` blocks until it is complete and returns its result.

    Until then it keeps the buffers alive that are being read or filled.
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
        """Block until the communication is complete; return its result (a receive's buffer, an all-reduce's tensor).

        Raises:
            CommMismatch: the data received belongs to a call that does not match this one.
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
    """One rank's end of all communication.

    Attributes:
        staged: tensors live on a GPU and the backend takes only host memory (ranks share a GPU, over gloo).
        before: a function called before each communication, or None. (The classroom uses it to delay ranks.)
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
            kind, group, number, peer, nbytes: as in `mpkit.trace.OP`.
            start: starts the communication and returns torch's handle.
            result: called once the communication is complete; returns the result of `Work.wait`.
            waits: the caller waits at once. Starting then counts as waiting, not as work that could overlap with the
                communication. (A backend's thread may take the core during the start.)
            call: the call to compare with its peers' calls, before it starts and once it is complete; None: not
                compared.

        Raises:
            CommMismatch: a peer's call does not match.
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
        """Return `tensor` in a form that the backend can send: contiguous, detached, in host memory if staged."""
        tensor = tensor.detach()
        if self.staged:
            op = self.record.begin(Kind.COPY_TO_HOST, nbytes=tensor.nbytes)
            tensor = tensor.cpu()
            self.record.end(op)
        return tensor.contiguous()

    def incoming(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Return an empty tensor that the backend can fill."""
        return torch.empty(shape, dtype=like.dtype, device="cpu" if self.staged else like.device)

    def arrived(self, wire: Tensor, into: Tensor | None = None) -> Tensor:
        """Return what the backend filled, on this rank's device, copied `into` a tensor if one is given."""
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
        """Return the source line of the call: the innermost one outside this package."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__package__") == __package__:
            frame = frame.f_back
        if frame is None:
            return ""
        key = (frame.f_code, frame.f_lineno)
        place = self._places.get(key)
        if place is None:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            self._places[key] = place
        return place

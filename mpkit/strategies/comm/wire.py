"""Wire: the state that all communicators of a rank share, and the one function that starts every communication.

    record      begin the communication's op in the trace, with the source line of the call
    publish     publish the call's fingerprint, and compare it with those of its peers
    start       call torch.distributed, which returns a handle
    wait        now or later, by `Work.wait`; the call is compared once more

If ranks share a GPU, their backend (gloo) takes host memory only: `prepare_send`, `make_buffer` and `finish_receive`
stage tensors through it, and record the copies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mpkit.common.torch_private import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from mpkit.strategies.comm.call_checks import CallChecks, CheckedCall
from mpkit.trace import Kind
from mpkit.trace.record.recorder import Recorder
from mpkit.trace.records import LAYER

if TYPE_CHECKING:
    from mpkit.strategies.comm.communicator import Communicator


_WATCHED = DispatchKeySet(DispatchKey.BackendSelect)
"""The dispatch key at which `mpkit.launch.watch` listens to calls of torch.distributed."""

_ALLOCATE_NOTHING = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST, Kind.SEND, Kind.RECV)
"""The kinds whose start makes no tensors in gloo; the making of a tensor passes through the same key."""


class CallNumber(NamedTuple):
    """A communication as its ranks identify it: the group or the channel, and the number in it."""

    kind: Kind
    group: str  # "0,1,2,3", or the channel of a message, "0>4#F3"
    number: int  # of earlier communications of that group or channel
    peer: int = -1  # the root or the other end, a global rank; -1: there is none
    call: CheckedCall | None = None  # None: not compared with the peers' calls


@dataclass
class Work:
    """A communication in progress. `wait` blocks until it is complete and returns its result.

    Until then it keeps the buffers alive that are being read or filled.
    """

    _record: Recorder
    _op: int
    _handle: Any
    _result: Callable[[], Tensor]
    _where: str
    _waiting: int = -1
    _call: CheckedCall | None = None
    _value: Tensor | None = None

    def wait(self) -> Tensor:
        """Block until the communication is complete; return its result, as a receive's buffer."""
        if self._value is None:
            record, waiting = self._record, self._waiting
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


class PendingWork(Protocol):
    """A communication in progress: a `Work` or a `CompletedWork`."""

    def wait(self) -> Tensor:
        """Wait until the communication is complete and return its result."""


class CompletedWork(NamedTuple):
    """A communication without a partner: it is complete at once."""

    result: Tensor

    def wait(self) -> Tensor:
        """Return the result."""
        return self.result


class Wire:
    """One rank's end of all communication; `checks` compares calls with those of the peers."""

    def __init__(
        self, rank: int, world_size: int, record: Recorder, device: torch.device, backend: str,
        checks: CallChecks | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.world_size = rank, world_size
        self.record, self.device, self.checks = record, device, checks
        self.communicators: dict[tuple[int, ...], Communicator] = {}
        self.messages: dict[str, int] = {}  # by channel, their number so far
        # Whether messages are matched by tag; otherwise by order, which both ends must keep.
        self.gloo, self.by_name = backend == "gloo", backend != "nccl"
        self.staged = device.type != "cpu" and self.gloo  # tensors go through host memory
        self.before: Callable[[], None] | None = None  # is called before each communication, to delay ranks
        # The layer whose parameters or gradients are sent, and the names of the parameters of which ranks send parts.
        self.layer = self.what = ""
        self.checks_of_layers: CallChecks | None = None  # compares these names where `checks` is None
        self._places: dict[tuple[CodeType, int], str] = {}

    @contextmanager
    def sending_for(self, layer: str, what: str = "") -> Iterator[None]:
        """Within the block, record communication as that of a layer, and let ranks compare `what` they send."""
        self.layer, self.what = layer, what
        try:
            yield
        finally:
            self.layer = self.what = ""

    def take_message(self, kind: Kind, other: int, tag: int | str) -> tuple[str, int, tuple[int, int]]:
        """Count a message to or from a global rank; return its channel ("0>4#F3"), its number there, and both ends."""
        ends = src, dst = (self.rank, other) if kind == Kind.SEND else (other, self.rank)
        channel = f"{src}>{dst}#{tag}"
        self.messages[channel] = self.messages.get(channel, 0) + 1
        return channel, self.messages[channel] - 1, ends

    def issue(
        self, numbered: CallNumber, nbytes: int, start: Callable[[], Any], result: Callable[[], Tensor],
        *, waits: bool = False, rows: Sequence[int] = (),
    ) -> Work:  # fmt: skip
        """Record a communication and start it.

        Args:
            result: called once the communication is complete; returns the result of `Work.wait`.
            waits: the caller waits at once. Starting then counts as waiting, not as work that could overlap with the
                communication. (A backend's thread may take the core during the start.)
            rows: for each member of the group, in an all-to-all of uneven parts.
        """
        if self.before is not None:
            self.before()
        # ---- record
        kind, group, number, peer, call = numbered
        record, where = self.record, self.find_source_line()
        text = ("" if call is None else call.text) or (self.layer and f"{LAYER}{self.layer}")
        op = record.begin(kind, text, group=group, number=number, peer=peer, nbytes=nbytes, where=where)
        if nbytes and rows:
            record.note_parts(op, [nbytes // sum(rows) * each for each in rows])
        # ---- publish
        if call is not None:
            call.publish()
        # ---- start
        waiting = record.begin(Kind.WAIT, ref=op, where=where) if waits else -1
        try:
            with self._hide_from_watch(kind):
                handle = start()
        except BaseException:
            record.end(waiting)
            raise
        return Work(record, op, handle, result, where, waiting, call)

    def run(
        self, numbered: CallNumber, nbytes: int, start: Callable[[], Any], result: Callable[[], Tensor],
        rows: Sequence[int] = (),
    ) -> Tensor:  # fmt: skip
        """Record a communication, start it, and wait for it; see `issue`."""
        return self.issue(numbered, nbytes, start, result, waits=True, rows=rows).wait()

    def _hide_from_watch(self, kind: Kind) -> AbstractContextManager[Any]:
        """Bypass `mpkit.launch.watch`, which costs time, for a call that is recorded here."""
        unseen = self.gloo and kind in _ALLOCATE_NOTHING
        return _ExcludeDispatchKeyGuard(_WATCHED) if unseen else nullcontext()

    # ---- tensors as the backend takes them ----------------------------------------------------------------

    def prepare_send(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in a form that the backend can send: contiguous, detached, in host memory if staged."""
        # Backends send the memory, not what a view shows.
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if self.staged:
            op = self.record.begin(Kind.COPY_TO_HOST, nbytes=tensor.nbytes)
            tensor = tensor.cpu()
            self.record.end(op)
        return tensor.contiguous()

    def make_buffer(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Return an empty tensor that the backend can fill."""
        return torch.empty(shape, dtype=like.dtype, device="cpu" if self.staged else like.device)

    def finish_receive(self, filled: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the received tensor on this rank's device, copied `into` a tensor if one is given."""
        if into is None:
            if not self.staged:
                return filled
            into = torch.empty(filled.shape, dtype=filled.dtype, device=self.device)
        if into.untyped_storage()._cdata != filled.untyped_storage()._cdata:
            op = self.record.begin(Kind.COPY_TO_DEVICE, nbytes=filled.nbytes) if self.staged else -1
            into.detach().copy_(filled)
            if self.staged:
                self.record.end(op)
        return into

    # ---- the line of the call -----------------------------------------------------------------------------

    def find_source_line(self) -> str:
        """Return the source line of the call: the innermost one outside this package."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__package__") == __package__:
            frame = frame.f_back
        if frame is None:
            return ""
        key = (frame.f_code, frame.f_lineno)
        if key not in self._places:
            self._places[key] = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        return self._places[key]

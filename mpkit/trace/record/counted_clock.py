"""A counted clock: code on tensors without content takes as long as it would on a device.

Time on fake tensors (shapes without numbers) means nothing. So it is not measured but counted: each operator advances
the clock by the time of its FLOPs or of its bytes on a chosen device, whichever is longer (the roofline, Williams,
Waterman and Patterson 2009). The recorder reads that clock instead of the wall clock, so that ops, their communication
and the memory that they free have the device's times.

CountingMode      the clock, and what has been counted so far
CountedRecorder   a Recorder on that clock, whose ops have the FLOPs, bytes and operators that were counted meanwhile
"""

import struct
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mpkit.common.torch_private import TorchDispatchMode, _disable_current_modes, _local_scalar_dense
from mpkit.trace import HEADER, OP, Kind
from mpkit.trace.record.ledger import Ledger
from mpkit.trace.record.operators import flops_of, moved_by, tensors_in
from mpkit.trace.record.recorder import Recorder
from mpkit.trace.record.workspace import with_workspace, workspace_of

_LONG = struct.Struct("<q").pack_into
_FLOAT = struct.Struct("<d").pack_into
_AT = {name: int(OP.fields[name][1]) for name in ("bytes", "flops", "value")}  # type: ignore[index]
_FROM_NUMBERS = torch.ops.aten.lift_fresh


class Roofline(Protocol):
    """The properties of a device that the clock needs; `mpkit.devices.Device` has them."""

    @property
    def blocked_convolutions(self) -> bool:
        """Whether convolutions are oneDNN's, which take a workspace (`mpkit.trace.record.workspace`)."""

    @property
    def host(self) -> float:
        """Bytes per second between the device and the host's memory."""

    def time(self, flops: float, nbytes: float = 0.0, dtype: str = "float32") -> float:
        """Return the seconds that an op takes."""


class CountingMode(TorchDispatchMode):
    """A mode that counts the time of every operator on fake tensors, and answers when one is read.

    A tensor that was made from numbers, such as an order that ranks agree on, keeps them until it is written into.
    Any other tensor answers with a value that keeps a training going: True, 1, or for floats the largest finite
    number, which does not overflow and exceeds every limit, so that gradient clipping takes effect.
    """

    def __init__(self, device: Roofline) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.seconds = 1e-9  # since the beginning; an end at 0 would mean that an op is open
        self.flops, self.nbytes = 0.0, 0
        self.operators = 0  # with any FLOPs or bytes
        self._ledger: Ledger | None = None
        self._numbers: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()  # by storage

    def count_memory(self, ledger: Ledger) -> None:
        """Count each storage that an operator makes in this ledger from now on."""
        self._ledger = ledger

    def _count_memory_of(self, func: Any, args: tuple[Any, ...], out: Any, ledger: Ledger) -> None:
        """Count an operator's results, and its kernel's workspace meanwhile."""
        workspace = workspace_of(func, args, out) if self.device.blocked_convolutions else 0
        if workspace:
            ledger.change(("buffers", workspace), ("buffers", -workspace))
        for tensor in tensors_in(out):
            ledger.notice(tensor)

    def now(self) -> int:
        """Return the wall clock and the thread's clock in ns; each call advances it, so that no two events coincide."""
        self.seconds += 1e-9
        return round(self.seconds * 1e9)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is _local_scalar_dense:
            return self._answer(args[0])
        out = func(*args, **kwargs)
        if self.device.blocked_convolutions:
            out = with_workspace(func, args, out)
        if func.overloadpacket is _FROM_NUMBERS:
            self._numbers[out.untyped_storage()] = args[0]
        elif len(self._numbers) and func._schema.is_mutable:
            for written in tensors_in((args, kwargs.get("out"))):
                self._numbers.pop(written.untyped_storage(), None)
        flops, nbytes = flops_of(func, args, kwargs, out), moved_by(func, args, kwargs, out)
        if flops or nbytes:
            self.flops += flops
            self.nbytes += nbytes
            self.operators += 1
            self.seconds += self.device.time(flops, nbytes, _dtype(args, out))
        if self._ledger is not None and not func.is_view:
            self._count_memory_of(func, args, out, self._ledger)
        return out

    def numbers(self, tensor: Tensor) -> Tensor | None:
        """Return the numbers that a tensor without content was made from, if it still has them."""
        return self._numbers.get(tensor.untyped_storage())

    def tell(self, tensor: Tensor, numbers: Tensor) -> None:
        """Note the numbers of a tensor, until it is written into."""
        self._numbers[tensor.untyped_storage()] = numbers

    def _answer(self, tensor: Tensor) -> bool | int | float:
        known = self._numbers.get(tensor.untyped_storage())
        if known is not None:
            with _disable_current_modes():
                where = known.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                return where.item()
        if tensor.is_floating_point():
            return torch.finfo(tensor.dtype).max
        return True if tensor.dtype == torch.bool else 1


def _dtype(args: Any, out: Any) -> str:
    """Return the dtype that an operator computes in: that of its first floating-point argument or result."""
    for value in tensors_in((args, out)):
        if value.is_floating_point():
            return str(value.dtype).removeprefix("torch.")
    return "float32"


class CountedRecorder(Recorder):
    """A Recorder on a counted clock, which the caller enters. Losses are unknown, so none is written."""

    def __init__(self, folder: Path, rank: int, counting: CountingMode) -> None:
        super().__init__(folder, rank, now=counting.now, thread_time=counting.now)
        self._counting = counting
        counting.count_memory(self.ledger)
        self._begun: dict[int, tuple[float, int, int, float]] = {}  # FLOPs, bytes, operators, seconds before

    def begin(self, kind: int, name: str = "", **columns: Any) -> int:
        """Write that an op begins, as a Recorder does."""
        index = super().begin(kind, name, **columns)
        if kind < Kind.WAIT or Kind.COPY_TO_DEVICE <= kind < Kind.STEP:
            counted = self._counting
            self._begun[index] = counted.flops, counted.nbytes, counted.operators, counted.seconds
        return index

    def end(self, index: int, *, nbytes: int = 0) -> None:
        """Write that an op ends: a copy takes the transfer time to or from the host, compute the counted time."""
        begun = self._begun.pop(index, None)
        if begun is None:
            super().end(index, nbytes=nbytes)
            return
        at = HEADER.itemsize + OP.itemsize * index
        flops, moved, operators, seconds = begun
        counted = self._counting
        if self._file.map[at] >= Kind.COPY_TO_DEVICE:
            (size,) = struct.unpack_from("<q", self._file.map, at + _AT["bytes"])
            counted.seconds = seconds + size / counted.device.host
            super().end(index, nbytes=nbytes)
            return
        super().end(index)
        _FLOAT(self._file.map, at + _AT["flops"], counted.flops - flops)
        _LONG(self._file.map, at + _AT["bytes"], counted.nbytes - moved)
        _FLOAT(self._file.map, at + _AT["value"], counted.operators - operators)

    def begin_memory(self, key: Hashable, *, varies: bool = False) -> None:
        """Measure every step: each operator is seen anyway."""

    def loss(self, value: float) -> None:
        """Write nothing: the loss is unknown."""

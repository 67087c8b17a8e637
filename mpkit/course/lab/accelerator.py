"""An accelerator with a clock that counts: what a training loop makes it wait for.

The tensors are the CPU's. The times are those of a device that works behind its host, the same in each run:

    launch         the host takes 30 us per operator, and goes on; views cost nothing
    device         does the operators in order, 60 us each
    synchronize    whoever reads a number (.item(), .tolist(), bool(), print) waits until the device has done all of it
    read           a batch takes 3 ms: of the host, or of a worker that reads ahead
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpkit.common.torch_private import TorchDispatchMode, tree_leaves

__all__ = ["Accelerator", "LabSource", "ReadBatch"]

LAUNCH, OPERATOR, READ = 30e-6, 60e-6, 3e-3
"""Seconds: of the host per operator, of the device per operator, of a batch."""

SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")
COPIES = ("clone", "_to_copy", "copy_", "copy")

Batch = tuple[Tensor, Tensor]


class Accelerator(TorchDispatchMode):
    """Counts the time of what is done inside `with Accelerator() as device:`; `print(device)` is its profile.

    >>> import torch
    >>> with Accelerator() as device:
    ...     total = torch.ones(3)
    ...     for _ in range(2):
    ...         total = total + 1
    ...     number = total.sum().item()
    >>> print(device)
    operator       calls  device ms
    add                2       0.12
    ones               1       0.06
    sum                1       0.06
    synchronized 1 times; idle for 0.03 of 0.27 ms; copied 0 bytes

    Attributes:
        host, device: the times until which each is busy, in seconds.
        idle: seconds in which the device had nothing to do.
        syncs: how often the host waited for the device.
        copied: bytes of copies.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.host = self.device = self.idle = 0.0
        self.syncs = self.copied = 0
        self.calls: dict[str, int] = {}
        self._modes = ExitStack()

    def __enter__(self) -> Accelerator:
        """Start counting."""
        self._modes.enter_context(_Reads(self.synchronize))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *how: Any) -> None:
        """Stop counting."""
        super().__exit__(*how)  # type: ignore[no-untyped-call]
        self._modes.close()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator, and count its time."""
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in SYNCHRONIZING:
            self.synchronize()
        elif not func.is_view and name not in ("detach", "alias", "lift_fresh"):
            self._launch(name)
        if name in COPIES:
            self.copied += sum(each.nbytes for each in tree_leaves(made) if isinstance(each, Tensor))
        return made

    def synchronize(self) -> None:
        """Let the host wait for the device."""
        self.syncs += 1
        self.host = max(self.host, self.device)

    def _launch(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.host += LAUNCH
        self.idle += max(0.0, self.host - self.device)
        self.device = max(self.device, self.host) + OPERATOR

    def __str__(self) -> str:
        """Return the profile: operators by their time, and what the device waited for."""
        rows = sorted(self.calls.items(), key=lambda row: (-row[1], row[0]))
        table = "".join(f"\n{name:<13} {count:>6} {1e3 * OPERATOR * count:>10.2f}" for name, count in rows)
        total = max(self.host, self.device)
        end = f"idle for {1e3 * self.idle:.2f} of {1e3 * total:.2f} ms; copied {self.copied} bytes"
        return f"{'operator':<13} {'calls':>6}  device ms{table}\nsynchronized {self.syncs} times; {end}"


class _Reads(TorchFunctionMode):
    """Notices what reads numbers without an operator."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self._synchronize = synchronize

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            self._synchronize()
        return func(*args, **(kwargs or {}))


class LabSource:
    """Batches that have to be read: by the host, or ahead by a worker.

    Args:
        batches: (inputs, targets) of each step.
        device: whose host reads.
    """

    def __init__(self, batches: Sequence[Batch], device: Accelerator) -> None:
        self._batches, self._device = batches, device
        self._worker = 0.0
        self.open = self.most_open = 0

    def read(self, step: int) -> Batch:
        """Read a step's batch, and wait for it."""
        self._device.host += READ
        return self._batches[step]

    def start(self, step: int) -> ReadBatch:
        """Let the worker read a step's batch, after those that were started before; return at once."""
        self._worker = max(self._worker, self._device.host) + READ
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        return ReadBatch(self, self._batches[step], self._worker)

    def ready(self, at: float) -> None:
        """Let the host wait until a time."""
        self._device.host = max(self._device.host, at)
        self.open -= 1


class ReadBatch:
    """A batch that a worker reads."""

    def __init__(self, source: LabSource, batch: Batch, ready: float) -> None:
        self._source, self._batch, self._ready = source, batch, ready

    def get(self) -> Batch:
        """Wait until the batch is there, and return it; once."""
        self._source.ready(self._ready)
        return self._batch

"""A measured step: every operator is seen once, for its FLOPs, for the bytes that it moves and for the memory it takes.

A dispatch mode costs some 20 us per operator, so only the first steps are measured, and what they showed is used for
those that do the same (`mpkit.launch.watch.costs`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpkit.common.process_wide import Replacements
from mpkit.common.torch_private import TorchDispatchMode
from mpkit.trace.record.ledger import Ledger
from mpkit.trace.record.operators import flops_of, moved_by, tensors_in

__all__ = ["StepMeasurement"]

_DESUGARED = {"DTensor", "AsyncCollectiveTensor"}
"""Tensors made of others: let them run first, then see the operators on the local tensors."""


class StepMeasurement(TorchDispatchMode):
    """The mode that sees every operator of a step.

    Args:
        ledger: where memory is counted.
        category: returns the category of memory that is taken now.

    Attributes:
        flops: FLOPs so far.
        nbytes: bytes read and written so far.
        peak: what was held, by category, when most was held since `forget_peak`.
    """

    def __init__(self, ledger: Ledger, category: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._category = ledger, category
        self._replaced = Replacements()
        self.flops = 0.0
        self.nbytes = 0
        self.peak = dict(ledger.held)

    def __enter__(self) -> Any:
        resize, ledger = torch.UntypedStorage.resize_, self._ledger

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:  # as FSDP does, past all operators
            resized = resize(storage, size)
            ledger.note_resize(storage)
            self._look()
            return resized

        self._replaced.put(torch.UntypedStorage, "resize_", resize_)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._replaced.restore()

    def forget_peak(self) -> dict[str, int]:
        """Return the peak, and look for another one from now on."""
        peak, self.peak = self.peak, dict(self._ledger.held)
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ in _DESUGARED for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.flops += flops_of(func, args, kwargs, out)
        self.nbytes += moved_by(func, args, kwargs, out)
        for tensor in tensors_in(out):
            self._ledger.track(tensor, self._category())
        self._look()
        return out

    def _look(self) -> None:
        held = self._ledger.held
        if sum(held.values()) > sum(self.peak.values()):
            self.peak = dict(held)

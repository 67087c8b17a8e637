"""A recorder that records nothing, for ranks that nobody looks at: those of a plain torchrun."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch

from mpkit.trace import CATEGORIES
from mpkit.trace.record.contexts import Current
from mpkit.trace.record.ledger import Ledger
from mpkit.trace.record.memory import Instrument, StepMemory
from mpkit.trace.record.recorder import Recorder


class SilentLedger(Ledger):
    """A ledger without entries."""

    def __init__(self) -> None:
        self.held = dict.fromkeys(CATEGORIES, 0)

    def track(self, tensor: torch.Tensor, category: str) -> None:
        """Count nothing."""

    def move(self, tensor: torch.Tensor, category: str) -> None:
        """Count nothing."""

    def change(self, *deltas: tuple[str, int]) -> None:
        """Count nothing."""

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """Count nothing."""


class SilentMemory(StepMemory):
    """The memory of steps that nobody looks at."""

    def __init__(self) -> None:
        self.active = self.playing = False

    def add(self, instrument: Instrument) -> None:
        """Install nothing."""

    def remove(self, instrument: Instrument) -> None:
        """Do nothing."""

    def saving(self) -> Any:
        """Return a context that does nothing."""
        return nullcontext()


class SilentRecorder(Recorder):
    """A Recorder without files: strategies call it as they call any other.

    >>> record = SilentRecorder()
    >>> with record.step(0), record.span("attention"):
    ...     record.begin(0), record.busy
    (-1, False)
    """

    def __init__(self) -> None:
        self.layers = False
        self.ledger = SilentLedger()
        self.memory = SilentMemory()
        self.allocated = None

    def begin(self, kind: int, name: str = "", **columns: Any) -> int:
        """Record nothing, and return the index of no op."""
        return -1

    def note_parts(self, index: int, parts: Sequence[int]) -> None:
        """Record nothing."""

    def end(self, index: int, *, nbytes: int = 0) -> None:
        """Record nothing."""

    def drop(self, index: int) -> None:
        """Record nothing."""

    def step(self, number: int) -> Any:
        """Return a context that does nothing."""
        return nullcontext()

    def begin_step(self, number: int) -> None:
        """Record nothing."""

    def begin_memory(self, key: Hashable, *, varies: bool = False) -> None:
        """Record nothing."""

    def end_step(self) -> None:
        """Record nothing."""

    def loss(self, value: float) -> None:
        """Record nothing."""

    def costs(self, index: int, flops: float, nbytes: int) -> None:
        """Record nothing."""

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Record nothing."""

    @property
    def count(self) -> int:
        """The number of ops: none."""
        return 0

    def idle(self, idle: bool) -> None:
        """Record nothing."""

    def span(self, name: str, *, flops: float = 0.0, nbytes: int = 0) -> Any:
        """Return a context that does nothing."""
        return nullcontext()

    @property
    def current(self) -> Current:
        """Nowhere."""
        return Current(None, None, None)

    @property
    def busy(self) -> bool:
        """Whether an op is open: never."""
        return False

    def place(self) -> tuple[int, int, int]:
        """Return that there is no stage, micro-batch or step."""
        return -1, -1, -1

    def close(self, state: Literal["finished", "failed"] = "finished") -> None:
        """Do nothing."""

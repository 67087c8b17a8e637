"""Loader: the parts of batches that a rank takes, read by itself or by workers, as torch.utils.data.DataLoader does.

    wanted    determine which parts of a step's batch this rank takes
    read      read each of them from the source: here, or ahead of time in worker processes
    record    record the time that the rank waited for them: an op of its own kind, on a lane of its own

Reading in workers while the rank computes takes the rank no time, and is not recorded.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mpkit.strategies.data.microbatch import Value, leaves, map_tensors
from mpkit.trace import Kind
from mpkit.trace.record.recorder import Recorder

if TYPE_CHECKING:
    from mpkit.strategies.job.feed import BatchSource

__all__ = ["Loader", "Parts"]

Parts = dict[tuple[int, int, int], tuple[Value, Value]]
"""(inputs, targets) by their position in the batch: (start, stop, stride)."""


class Loader:
    """This rank's parts of each step's batch, in the order of the steps.

    Args:
        source: source of the batches.
        wanted: returns which parts of a step's batch this rank takes.
        steps: the steps that there will be.
        record: this rank's recorder.
        pins: whether the parts are to be copied to a GPU.
    """

    def __init__(
        self,
        source: BatchSource,
        wanted: Callable[[int], list[slice]],
        steps: range,
        record: Recorder,
        *,
        pins: bool,
    ) -> None:
        self._steps = _Steps(source, wanted)
        self._order = steps
        self._record, self._records = record, source.loads
        self._workers, self._ahead = source.num_workers, source.prefetch
        self._pins = pins and source.pin_memory
        self._read: Iterator[Parts] | None = None

    def load(self, step: int) -> Parts:
        """Return what the rank takes of this step's batch."""
        op = self._record.begin(Kind.DATA, "data") if self._records else -1
        parts = self._next_parts() if self._workers else self._steps[step]
        if self._pins and not self._workers:
            parts = {
                which: (_pin_memory(inputs), _pin_memory(targets))
                for which, (inputs, targets) in parts.items()
            }
        if self._records:
            nbytes = sum(t.nbytes for x, y in parts.values() for t in (*leaves(x), *leaves(y)))
            self._record.end(op, nbytes=nbytes)
        return parts

    def close(self) -> None:
        """End the workers."""
        self._read = None

    def _next_parts(self) -> Parts:
        if self._read is None:
            loader = DataLoader(
                self._steps, batch_size=None, sampler=self._order, num_workers=self._workers,
                collate_fn=_as_they_are, prefetch_factor=self._ahead, pin_memory=self._pins,
                multiprocessing_context="fork", worker_init_fn=_die_with_the_rank,
                generator=torch.Generator().manual_seed(0),
            )  # fmt: skip
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # threads do not survive a fork
                self._read = iter(loader)
        return next(self._read)


class _Steps(Dataset[Parts]):
    """The parts that a rank takes, by step."""

    def __init__(self, source: BatchSource, wanted: Callable[[int], list[slice]]) -> None:
        self._source, self._wanted = source, wanted

    def __getitem__(self, step: int) -> Parts:
        """Read the parts of a step's batch now."""
        return {
            (which.start, which.stop, which.step or 1): self._source.part(step, which)
            for which in self._wanted(step)
        }


def _pin_memory(value: Value) -> Value:
    return map_tensors(Tensor.pin_memory, value)


def _as_they_are(parts: Any) -> Any:
    return parts


def _die_with_the_rank(_worker: int) -> None:
    """Let a worker end with its rank, however the rank ends; torch's own watchdog takes seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)

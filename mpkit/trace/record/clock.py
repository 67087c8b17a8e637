"""When an op begins and ends: at once on the CPU, some time later on a GPU or another accelerator.

A GPU works asynchronously: when a forward returns, its kernels may not have started. So CudaClock records an event in
the stream where an op begins and where it ends, and reads their times at the end of the step, when the GPU has finished
anyway. torch.xpu and torch.hpu have the same events as torch.cuda; on mps, which times events otherwise, the host's
times stand.
"""

import time
from typing import Any

import torch

from mpkit.trace import TIMED_BY_EVENTS


class Clock:
    """The clock of a CPU, which works synchronously: the wall clock around an op shows the op's time."""

    late = False  # whether times are known only later: `mark` every op, and `resolve` now and then

    def mark(self, index: int, end: bool) -> None:
        """Mark the beginning or the end of op `index`, after all queued work."""

    def resolve(self) -> list[tuple[int, int, int]]:
        """Wait for the device; return (index, start, end) of ops marked twice, in ns of the monotonic clock."""
        return []


class CudaClock(Clock):
    """Events of CUDA (or XPU, HPU) in the device's current stream, put on the machine's monotonic clock.

    An anchor ties the two clocks together: an event on an idle GPU whose host time is known. Event times are
    float32 milliseconds since the anchor, so the anchor is renewed with every `resolve`: a step of one second is
    then timed to 0.1 us.
    """

    late = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._api = device, getattr(torch, device.type)
        self._spare: list[Any] = []  # events to reuse: creating one costs more than recording it
        self._begun: dict[int, Any] = {}  # an event, or its host time once that is known
        self._ended: list[tuple[int, Any, Any]] = []
        self._lay_anchor()

    def mark(self, index: int, end: bool) -> None:
        """Record an event for this op in the stream."""
        event = self._spare.pop() if self._spare else self._api.Event(enable_timing=True)
        event.record(self._api.current_stream(self._device))
        if not end:
            self._begun[index] = event
        elif index in self._begun:
            self._ended.append((index, self._begun.pop(index), event))

    def resolve(self) -> list[tuple[int, int, int]]:
        """Wait for the device; return (index, start, end) of the ops that have ended since the last call."""
        self._api.synchronize(self._device)
        resolved = [(i, self._host_time(begin), self._host_time(end)) for i, begin, end in self._ended]
        self._ended.clear()
        for index, begin in self._begun.items():  # still open: convert its start before the anchor moves
            self._begun[index] = self._host_time(begin)
        self._lay_anchor()
        return resolved

    def _lay_anchor(self) -> None:
        self._api.synchronize(self._device)
        self._anchor = self._api.Event(enable_timing=True)
        self._anchor.record(self._api.current_stream(self._device))
        self._anchor.synchronize()
        self._anchor_time = time.monotonic_ns()

    def _host_time(self, event: Any) -> int:
        if isinstance(event, int):
            return event
        self._spare.append(event)
        return self._anchor_time + int(self._anchor.elapsed_time(event) * 1e6)


def clock_for(device: torch.device | None) -> Clock:
    """Return the clock of a device."""
    return CudaClock(device) if device is not None and device.type in TIMED_BY_EVENTS else Clock()

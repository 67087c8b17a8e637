"""The Recorder writes what one rank does into its files, while it does it.

An op is written when it begins, as open, and again when it ends. So the file always says what the rank is doing
now, and what it was doing when it was killed or hung. The hot path is `begin` and `end`: two looks at the
clock, two packings into mapped memory, no allocation to speak of.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from mpkit.record.clock import clock_for
from mpkit.record.files import NameFile, RecordFile
from mpkit.record.ledger import Ledger
from mpkit.trace import HEADER, MEMORY, OP, Kind, Lane, lane_of

__all__ = ["Current", "Recorder"]

_PACK = struct.Struct("<BBBxhxxiiIIIiiiqqqqdd").pack_into  # one OP record
_LONG = struct.Struct("<q").pack_into
_TIMES = struct.Struct("<qq").pack_into
_VALUE = struct.Struct("<d").pack_into
_PLACE = struct.Struct("<hxxii").unpack_from  # stage, microbatch, step
_FIRST, _SIZE = HEADER.itemsize, OP.itemsize
_AT = {name: int(OP.fields[name][1]) for name in OP.names}  # type: ignore[index,union-attr]
_AT_LANE, _AT_PLACE, _AT_START, _AT_END = _AT["lane"], _AT["stage"], _AT["start"], _AT["end"]
_AT_BYTES, _AT_VALUE = _AT["bytes"], _AT["value"]
_LANE = bytes(lane_of(kind) for kind in range(256))
_COMPUTE = Lane.COMPUTE.value
_STATES = {"finished": 1, "failed": 2}


class Current(NamedTuple):
    """Where a rank is; None where that does not apply."""

    step: int | None
    stage: int | None
    microbatch: int | None


class Recorder:
    """Writes one rank's operations and memory; a function run by `Cluster.run` has it as `ctx.record`.

    One thread at a time begins and ends ops; memory may change in any.

    Attributes:
        ledger: the memory this rank holds, by category.
        layers: whether hooks record every layer within an action as well.
    """

    def __init__(
        self, folder: Path, rank: int, device: torch.device | None = None, *, layers: bool = False
    ) -> None:
        folder = Path(folder)
        self.layers = layers
        self._names = NameFile(folder / f"rank{rank}.names")
        memory = RecordFile(folder / f"rank{rank}.mem", "mem", MEMORY.itemsize)
        self._file = RecordFile(folder / f"rank{rank}.ops", "ops", OP.itemsize)
        self._memory = memory
        self._clock = clock_for(device)
        self._waits = self._clock.waits
        self._step = -1
        self._step_op = -1
        self._open: list[int] = []  # compute ops begun and not ended, outermost first
        self._cpu: list[int] = []  # the thread's CPU time when each of them began
        self._dropped = Current(None, None, None)
        self._dropped_at = -1  # ops there were then
        self.ledger = Ledger(memory, self._file)

    def begin(
        self,
        kind: int,
        name: str = "",
        *,
        stage: int = -1,
        microbatch: int = -1,
        flops: float = 0.0,
        nbytes: int = 0,
        group: str = "",
        number: int = -1,
        peer: int = -1,
        ref: int = -1,
        where: str = "",
    ) -> int:
        """Write that an op begins; returns the index to `end` it by, -1 if it could not be recorded.

        Ops of the compute lane nest. Communication may overlap anything.
        """
        file = self._file
        index = file.count
        if index >= file.capacity and not file.grow():
            return -1
        lane = _LANE[kind]
        depth = 0 if lane else len(self._open)
        names = self._names
        _PACK(
            file.map, _FIRST + _SIZE * index,
            kind, lane, depth, stage, microbatch, self._step, names[name], names[where], names[group],
            number, peer, ref, time.monotonic_ns(), 0, 0, nbytes, flops, 0.0,
        )  # fmt: skip
        file.publish(index + 1)
        if self._waits:
            self._clock.mark(index, False)
        if not lane:
            self._open.append(index)
            self._cpu.append(time.thread_time_ns())  # last, so that it counts nothing of the above
        return index

    def end(self, index: int, *, nbytes: int = 0) -> None:
        """Write that the op ended, with the CPU time its thread used; `nbytes` if known only now.

        Ops of the compute lane that were left open within it end as well.
        """
        cpu = 0
        if self._open and self._open[-1] == index:
            cpu = time.thread_time_ns() - self._cpu.pop()  # first, likewise
            self._open.pop()
        elif index in self._open:
            self.end(self._open[-1])
            self.end(index, nbytes=nbytes)
            return
        elif index < 0 or self._file.map[_FIRST + _SIZE * index + _AT_LANE] == _COMPUTE:
            return  # not recorded, or ended already with the op around it
        if self._waits:
            self._clock.mark(index, True)
        at = _FIRST + _SIZE * index
        _TIMES(self._file.map, at + _AT_END, time.monotonic_ns(), cpu)
        if nbytes:
            _LONG(self._file.map, at + _AT_BYTES, nbytes)

    def drop(self, index: int) -> None:
        """Leave the op open in the file, as what was under way when something failed, and go on without it."""
        if index in self._open:
            if self._dropped_at != self._file.count:  # the innermost op knows best where it was
                self._dropped, self._dropped_at = self.current, self._file.count
            keep = self._open.index(index)
            del self._open[keep:], self._cpu[keep:]

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One training step: every op begun inside belongs to it. Left by an exception, it stays open."""
        if number < 0:
            raise ValueError(f"steps are numbered from 0, and this one was to be {number}")
        self._step = number
        self._step_op = index = self.begin(Kind.STEP, "step")
        self.loss(nan)
        yield
        self.end(index)
        self._resolve()
        self._step = self._step_op = -1

    def loss(self, value: float) -> None:
        """Write the loss of the step that is under way."""
        if self._step < 0:
            raise ValueError("no step is under way: call record.loss(value) inside `with record.step(0):`")
        if self._step_op >= 0:
            _VALUE(self._file.map, _FIRST + _SIZE * self._step_op + _AT_VALUE, value)

    @contextmanager
    def span(self, name: str, *, flops: float = 0.0, nbytes: int = 0) -> Iterator[None]:
        """Record a piece of a function of your own: `with ctx.record.span("attention"):`.

        It has the stage and micro-batch of the op around it. Left by an exception, it stays open.
        """
        stage, microbatch, _ = self._place()
        index = self.begin(Kind.COMPUTE, name, stage=stage, microbatch=microbatch, flops=flops, nbytes=nbytes)
        try:
            yield
        except BaseException:
            self.drop(index)
            raise
        self.end(index)

    @property
    def current(self) -> Current:
        """Step, stage and micro-batch of the innermost open compute op, or of the one that just failed."""
        if not self._open and self._dropped_at == self._file.count:
            return self._dropped
        stage, microbatch, step = self._place()
        return Current(*(None if value < 0 else value for value in (step, stage, microbatch)))

    def _place(self) -> tuple[int, int, int]:
        """Stage, micro-batch and step of the innermost open compute op, -1 for none."""
        if not self._open:
            return -1, -1, self._step
        stage, microbatch, step = _PLACE(self._file.map, _FIRST + _SIZE * self._open[-1] + _AT_PLACE)
        return stage, microbatch, step

    def close(self, state: Literal["finished", "failed"] = "finished") -> None:
        """Write how the rank ended; nothing is recorded afterwards."""
        self._resolve()
        self._file.close(_STATES[state])
        self._memory.close(_STATES[state])
        self._names.close()

    def _resolve(self) -> None:
        """Put the device's own times in place of the host's."""
        for index, start, end in self._clock.resolve():
            at = _FIRST + _SIZE * index
            _LONG(self._file.map, at + _AT_START, start)
            _LONG(self._file.map, at + _AT_END, end)

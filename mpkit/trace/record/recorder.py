"""The Recorder writes what one rank does into the rank's files as it happens.

An op is written when it begins, as open, and again when it ends. So the file always says what the rank is doing, or
was doing when it was killed or hung. The hot path is `begin` and `end`: two readings of the clock, two writes into
mapped memory, and almost no allocation.

Reading the wall clock is cheap; reading a thread's CPU time is a system call that costs as much as all the rest. So
within 0.2 ms of such a reading, CPU time is assumed to advance with the wall clock: an op that begins right after
another needs no reading of its own. A system that gives the core to another process does so for longer, and a thread
sleeps only in a WAIT, after which CPU time is read again.
"""

import struct
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext, suppress
from math import nan
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from mpkit.trace import HEADER, MEMORY, OP, Kind, Lane, lane_of
from mpkit.trace.record.clock import clock_for
from mpkit.trace.record.contexts import Current, RecordedSpan, Step
from mpkit.trace.record.files import NameFile, RecordFile, warn_of_end
from mpkit.trace.record.ledger import Ledger
from mpkit.trace.record.memory import StepMemory, allocated_on
from mpkit.trace.record.sent_parts import SentParts
from mpkit.trace.record.values import Values

__all__ = ["Current", "Recorder"]

_BEGIN = struct.Struct("<BBBxhxxiiIIIiiiq16xqd8x").pack_into  # an OP record without end, cpu and value
_END = struct.Struct("<qq").pack_into
_LONG = struct.Struct("<q").pack_into
_FLOAT = struct.Struct("<d").pack_into
_PLACE = struct.Struct("<hxxii").unpack_from  # stage, microbatch, step
_FIRST, _SIZE = HEADER.itemsize, OP.itemsize
_AT = {name: int(OP.fields[name][1]) for name in OP.names}  # type: ignore[index,union-attr]
_AT_LANE, _AT_PLACE, _AT_START, _AT_END = _AT["lane"], _AT["stage"], _AT["start"], _AT["end"]
_AT_BYTES, _AT_VALUE, _AT_FLOPS = _AT["bytes"], _AT["value"], _AT["flops"]
_LANE = bytes(lane_of(kind) for kind in range(256))
_COMPUTE, _WAIT = Lane.COMPUTE.value, Kind.WAIT.value  # 0, 16
_NEAR = 200_000  # ns
_STATES = {"finished": 1, "failed": 2}

# An open op of the compute lane: its index, the thread's CPU time when it began, the depth of an op inside it, and the
# op around it. Building a tuple is faster than appending to two lists.
_Open: TypeAlias = "tuple[int, int, int, _Open | None]"
_NOTHING: _Open = (-2, 0, 0, None)


class Recorder:
    """The writer of one rank's operations and memory; a function run by `Cluster.run` has it as `ctx.record`.

    Only one thread at a time may begin and end ops, and ops end in the thread in which they began; memory may change in
    any thread.

    Args:
        folder: the folder for its files.
        rank: the rank that it records.
        device: the device whose memory and, on a GPU, whose times are recorded.
        layers: whether hooks also record every layer inside an action.
        now: the wall clock, in ns.
        thread_time: the CPU time of this thread, in ns.

    Attributes:
        ledger: the memory that this rank holds, by category.
        allocated: the device's allocator, which the ledger follows after each action; None on the CPU.
        memory: the memory of steps, measured or played back; see `mpkit.trace.record.memory`.
        values: what `log` writes.
    """

    def __init__(
        self, folder: Path, rank: int, device: torch.device | None = None, *, layers: bool = False,
        now: Callable[[], int] = time.monotonic_ns, thread_time: Callable[[], int] = time.thread_time_ns,
    ) -> None:  # fmt: skip
        self.folder = folder = Path(folder)
        self._now, self._thread_time = now, thread_time
        self.layers = layers
        self._memory = RecordFile(folder / f"rank{rank}.mem", "mem", MEMORY.itemsize)
        self._file = RecordFile(folder / f"rank{rank}.ops", "ops", OP.itemsize)
        self._names = NameFile(folder / f"rank{rank}.names", self._stop)
        self.ledger = Ledger(self._memory, self._file, device, now)
        self.allocated = allocated_on(device, self.ledger)
        self.memory = StepMemory(self.ledger, self._file, self.allocated)
        self.values = Values(folder, rank, self._names)
        self._sent_parts = SentParts(folder, rank)
        self._clock = clock_for(device)
        self._late = self._clock.late
        self._open = _NOTHING
        self._looked, self._cpu = 0, 0  # when the thread's CPU time was last read, and what it was
        self._step, self._step_op = -1, -1
        self._dropped, self._dropped_at = Current(None, None, None), -1

    def begin(
        self, kind: int, name: str = "", *, stage: int = -1, microbatch: int = -1, flops: float = 0.0,
        nbytes: int = 0, group: str = "", number: int = -1, peer: int = -1, ref: int = -1, where: str = "",
    ) -> int:  # fmt: skip
        """Write that an op begins; return the index with which to `end` it, -1 if it could not be recorded.

        Ops of the compute lane nest: an op that begins inside another ends before it. Communication may overlap
        anything. The arguments are columns of `mpkit.trace.OP`.
        """
        if self.memory.active and kind < _WAIT and self._open is _NOTHING:
            self.memory.begin(kind, name, self._now())
        names = self._names
        named, called, among = names[name], names[where] if where else 0, names[group] if group else 0
        file = self._file  # after the names: a disk without room for one closes it
        index = file.count
        if index >= file.capacity and not file.grow():
            return -1
        lane = _LANE[kind]
        around = self._open
        start = self._now()
        _BEGIN(
            file.map, _FIRST + _SIZE * index, kind, lane, 0 if lane else around[2], stage, microbatch, self._step,
            named, called, among, number, peer, ref, start, nbytes, flops,
        )  # fmt: skip
        file.count = index + 1
        _LONG(file.map, 8, index + 1)  # the header's count, set after the record: it counts complete records
        if self._late:
            self._clock.mark(index, False)
        if not lane:
            since = start - self._looked
            if kind == _WAIT:
                cpu = -1  # not needed
            elif since < _NEAR:
                cpu = self._cpu + since
            else:
                cpu = self._thread_time()
            self._open = (index, cpu, around[2] + 1 if around[2] < 255 else 255, around)  # `depth` is a byte
        return index

    def note_parts(self, index: int, parts: Sequence[int]) -> None:
        """Write the bytes that the all-to-all of uneven parts `index` sends to each member of its group, by place."""
        if index >= 0:
            self._sent_parts.write(index, parts)

    def end(self, index: int, *, nbytes: int = 0) -> None:
        """Write that the op ended, with the CPU time that its thread used, and `nbytes` if they are known only now.

        Ops of the compute lane that were left open inside it end as well.
        """
        now = self._now()
        file = self._file
        at = _FIRST + _SIZE * index
        last, cpu, _, around = self._open
        if last == index:
            assert around is not None
            self._open = around
            since = now - self._looked
            if cpu < 0:
                cpu = self._looked = 0
            elif since < _NEAR:
                cpu = self._cpu + since - cpu
            else:
                self._cpu, self._looked = self._thread_time(), now
                cpu = self._cpu - cpu
        elif index < 0:
            return
        elif file.map[at + _AT_LANE] != _COMPUTE:
            cpu = 0
        else:
            self._unwind(index)
            return
        if self._late:
            self._clock.mark(index, True)
        _END(file.map, at + _AT_END, now, cpu)
        if nbytes:
            _LONG(file.map, at + _AT_BYTES, nbytes)
        if last == index and around is _NOTHING:
            if self.memory.active and file.map[at] != _WAIT:
                self.memory.end(now)
            if self.allocated is not None:
                self.allocated.settle()

    def costs(self, index: int, flops: float, nbytes: int) -> None:
        """Write the FLOPs of a compute op and the bytes that it moved, which are known when it is over."""
        if index >= 0:
            at = _FIRST + _SIZE * index
            _FLOAT(self._file.map, at + _AT_FLOPS, flops)
            _LONG(self._file.map, at + _AT_BYTES, nbytes)

    def drop(self, index: int) -> None:
        """Leave the op open in the file, as the one that was running at a failure, and go on without it."""
        if index not in self._stack():
            return
        if self._dropped_at != self._file.count:  # the innermost of several knows best where the failure was
            self._dropped, self._dropped_at = self.current, self._file.count
        while self._open[0] >= index:
            self._open = self._open[3] or _NOTHING

    def step(self, number: int) -> Step:
        """Make the context of a training step: every op begun inside `with record.step(0):` belongs to it.

        If an exception leaves it, it stays open.
        """
        if number < 0:
            raise ValueError(f"steps are numbered from 0, and this one was to be {number}")
        return Step(self, number)

    def begin_step(self, number: int) -> None:
        """Begin a step, as `step` does on entering; its loss is not known yet."""
        self._step = number
        self._step_op = index = self.begin(Kind.STEP, "step")
        if index >= 0:
            _FLOAT(self._file.map, _FIRST + _SIZE * index + _AT_VALUE, nan)

    def begin_memory(self, key: Hashable, *, varies: bool = False) -> None:
        """Say that the present step's memory is that of every step with this key (`StepMemory.begin_step`)."""
        self.memory.begin_step(key, self._now(), varies=varies)

    def end_step(self) -> None:
        """End a step, as `step` does on leaving."""
        if self.memory.active:
            self.memory.end_step(self._now())
        self.end(self._step_op)
        if self._late:
            self._resolve()
        self._step = self._step_op = -1

    def loss(self, value: float) -> None:
        """Write the loss of the current step."""
        if self._step < 0:
            raise ValueError("no step is under way: call record.loss(value) inside `with record.step(0):`")
        if self._step_op >= 0:
            _FLOAT(self._file.map, _FIRST + _SIZE * self._step_op + _AT_VALUE, value)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log a number of your own; see `Context.log`."""
        self.values.log(name, value, self._step if step is None else step)

    def span(self, name: str, *, flops: float = 0.0, nbytes: int = 0) -> RecordedSpan:
        """Record a piece of a function of your own: `with ctx.record.span("attention"):`.

        It has the stage and micro-batch of the op around it. If an exception leaves it, it stays open.
        """
        return RecordedSpan(self, name, flops, nbytes)

    @property
    def current(self) -> Current:
        """Step, stage and micro-batch of the innermost open compute op, or of the one that just failed."""
        if self._open is _NOTHING and self._dropped_at == self._file.count:
            return self._dropped
        stage, microbatch, step = self.place()
        return Current(*(None if value < 0 else value for value in (step, stage, microbatch)))

    def is_inside(self, kind: int) -> bool:
        """Return whether an op of the compute lane of this kind is open."""
        return any(self._file.map[_FIRST + _SIZE * index + _AT["kind"]] == kind for index in self._stack())

    @property
    def busy(self) -> bool:
        """Whether an op of the compute lane is open."""
        return self._open is not _NOTHING

    def place(self) -> tuple[int, int, int]:
        """Return stage, micro-batch and step of the innermost open compute op, -1 for none."""
        if self._open is _NOTHING:
            return -1, -1, self._step
        stage, microbatch, step = _PLACE(self._file.map, _FIRST + _SIZE * self._open[0] + _AT_PLACE)
        return stage, microbatch, step

    @property
    def count(self) -> int:
        """The number of ops begun so far."""
        return self._file.count

    def idle(self, idle: bool) -> None:
        """Write whether the rank waits for its next task; to others, it has then finished."""
        self._file.mark(_STATES["finished"] if idle else 0)

    def close(self, state: Literal["finished", "failed"] = "finished") -> None:
        """Write how the rank ended; nothing is recorded afterwards."""
        self.memory.flush()
        with suppress(RuntimeError) if state == "failed" else nullcontext():  # a failed GPU has no times
            self._resolve()
        self._names.close()
        self._file.close(_STATES[state], self._names.check)
        for file in (self._memory, self.values, self._sent_parts):
            file.close(_STATES[state])

    def _stop(self, error: OSError) -> None:
        """Stop recording: the disk has no room for a name, and records mean nothing without names."""
        count = self._file.count
        for file in (self._file, self._memory):
            file.stop()
        warn_of_end(count, f"{self.folder} has no room for a name ({error.strerror})")

    def _unwind(self, index: int) -> None:
        """End the ops that were left open inside op `index`, and then that op; do nothing if it has ended already."""
        if index in self._stack():
            while self._open[0] >= index:
                self.end(self._open[0])

    def _stack(self) -> Iterator[int]:
        """Yield the open ops of the compute lane, innermost first."""
        op: _Open | None = self._open
        while op is not None and op is not _NOTHING:
            yield op[0]
            op = op[3]

    def _resolve(self) -> None:
        """Replace the host's times by the device's own."""
        for index, start, end in self._clock.resolve():
            at = _FIRST + _SIZE * index
            _LONG(self._file.map, at + _AT_START, start)
            _LONG(self._file.map, at + _AT_END, end)

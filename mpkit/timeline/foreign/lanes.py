"""The compute lane of one rank: what its device computes.

On a GPU, kernels compute except for those of NCCL, RCCL and oneCCL, on whatever stream they run. Without a GPU the
operators compute, the outermost ones on the threads of the program, while the backend's own threads communicate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.foreign.kineto import PATTERNS, Events, EventTable
from mpkit.timeline.metrics import covered

__all__ = ["DeviceWork", "communication_kernels", "lies_within", "work_of"]

Array = npt.NDArray[Any]

_NOT_COMPUTE = ("c10d::", "record_param_comms", "gloo:", "nccl:", "_c10d_functional", "ProfilerStep")
_PROGRAM = ("ProfilerStep#", "Optimizer.", "autograd::", "c10d::", "DistributedDataParallel")


@dataclass
class DeviceWork:
    """What a rank's device computes, by start.

    Attributes:
        start, end: (n,) ns.
        asked: (n,) ns: when the program asked for it; the start where nothing tells.
        thread: (n,) the thread that asked for it; -1: unknown.
        name: (n,) numbers of `Events.names`: the operator, or the kernel where none is known.
        row: (n,) of the kernel's or the operator's table.
    """

    start: Array
    end: Array
    asked: Array
    thread: Array
    name: Array
    row: Array


def communication_kernels(events: Events) -> Array:
    """Return, for each kernel, whether it communicates."""
    chosen = np.zeros(len(events["kernel"]), bool)
    chosen[events.named("kernel", PATTERNS["communicates"].match)] = True
    return chosen


def work_of(events: Events) -> DeviceWork:
    """Return what a rank computes: kernels on a GPU, else the operators of its program."""
    return _of_kernels(events) if events.on_device else _of_operators(events)


def _of_kernels(events: Events) -> DeviceWork:
    kernel = events["kernel"]
    rows = np.flatnonzero(~communication_kernels(events))
    rows = rows[np.argsort(kernel.start[rows], kind="stable")]
    launch, operator = events.launches("kernel")[rows], events.operators("kernel")[rows]
    calls, ops = events["call"], events["op"]
    start = kernel.start[rows]
    asked = np.where(launch >= 0, np.append(calls.start, 0)[launch], start)
    thread = np.where(launch >= 0, np.append(calls.thread, -1)[launch], -1)
    name = np.where(operator >= 0, np.append(ops.name, 0)[operator], kernel.name[rows])
    return DeviceWork(start, kernel.end[rows], asked, thread, name, rows)


def _of_operators(events: Events) -> DeviceWork:
    """Return the outermost operators on the program's threads, without those that communicate."""
    ops = events["op"]
    apart = np.zeros(len(ops), bool)
    apart[events.named("op", lambda name: name.startswith(_NOT_COMPUTE))] = True
    chosen = np.flatnonzero(_on_program_threads(events))
    chosen = chosen[np.lexsort((-ops.end[chosen], ops.start[chosen], ops.thread[chosen]))]
    keep, last_thread, last_end = [], -1, 0
    for row, thread, start, end, skipped in zip(
        chosen.tolist(), ops.thread[chosen].tolist(), ops.start[chosen].tolist(), ops.end[chosen].tolist(),
        apart[chosen].tolist(), strict=True,
    ):  # fmt: skip
        if thread != last_thread or start >= last_end:  # else it is within the one before
            last_thread, last_end = thread, end
            if not skipped:
                keep.append(row)
    rows = np.array(keep, np.int64)
    rows = rows[np.argsort(ops.start[rows], kind="stable")]
    return DeviceWork(ops.start[rows], ops.end[rows], ops.start[rows], ops.thread[rows], ops.name[rows], rows)


def _on_program_threads(events: Events) -> Array:
    """Return, for each operator, whether its thread is one of the program's, on which no backend works alone."""
    program = [
        events[word].thread[events.named(word, lambda name: name.startswith(_PROGRAM))]
        for word in ("op", "annotation")
    ]
    backend = events.named("annotation", lambda name: name.startswith(("gloo:", "ucc:", "mpi:")))
    alone = np.setdiff1d(events["annotation"].thread[backend], np.concatenate(program))
    return ~np.isin(events["op"].thread, alone)


def lies_within(inner: EventTable, rows: Array, outer: EventTable, around: Array) -> Array:
    """Return, for each of these rows of `inner`, whether one of the rows `around` of `outer` has it on its thread."""
    found = np.zeros(len(rows), bool)
    for thread in np.unique(outer.thread[around]).tolist():
        mine = around[outer.thread[around] == thread]
        spans = covered(outer.start[mine], outer.end[mine])
        here = inner.thread[rows] == thread
        at = np.searchsorted(spans[:, 0], inner.start[rows], side="right") - 1
        found |= here & (at >= 0) & (inner.start[rows] < spans[np.maximum(at, 0), 1])
    return found

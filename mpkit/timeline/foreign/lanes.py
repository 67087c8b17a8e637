"""The lanes of one rank: what computes, what communicates, what copies.

On a GPU, kernels compute except for those of NCCL, RCCL and oneCCL, on whatever stream they run. Without a GPU the
operators compute, the outermost ones on the threads of the program, while the backend's own threads communicate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.foreign.collectives import communicates
from mpkit.timeline.foreign.reading.events import Events, EventTable

__all__ = [
    "DeviceWork",
    "communication_kernels",
    "covered_times",
    "length",
    "lies_within",
    "work_of",
]

Array = npt.NDArray[Any]
_NOT_COMPUTE = ("c10d::", "record_param_comms", "gloo:", "nccl:", "_c10d_functional", "ProfilerStep")


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
    of_name = np.array([communicates(name) for name in events.names] + [False])
    return of_name[events["kernel"].name]


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
    apart = np.array([name.startswith(_NOT_COMPUTE) for name in events.names] + [False])
    chosen = np.flatnonzero(_on_program_threads(events))
    chosen = chosen[np.lexsort((-ops.end[chosen], ops.start[chosen], ops.thread[chosen]))]
    keep, last_thread, last_end = [], -1, 0
    for row, thread, start, end, skipped in zip(
        chosen.tolist(), ops.thread[chosen].tolist(), ops.start[chosen].tolist(), ops.end[chosen].tolist(),
        apart[ops.name[chosen]].tolist(), strict=True,
    ):  # fmt: skip
        if skipped and (thread != last_thread or start >= last_end):
            last_thread, last_end = thread, end  # what it does inside is its own
        elif thread != last_thread or start >= last_end:
            keep.append(row)
            last_thread, last_end = thread, end
    rows = np.array(keep, np.int64)
    rows = rows[np.argsort(ops.start[rows], kind="stable")]
    return DeviceWork(ops.start[rows], ops.end[rows], ops.start[rows], ops.thread[rows], ops.name[rows], rows)


def _on_program_threads(events: Events) -> Array:
    """Return, for each operator, whether its thread is one of the program's, on which no backend works alone."""
    ops, said = events["op"], events["annotation"]
    beginnings = ("ProfilerStep#", "Optimizer.", "autograd::", "c10d::", "DistributedDataParallel")
    backend = np.array([name.startswith(("gloo:", "ucc:", "mpi:")) for name in events.names] + [False])
    program = np.array([name.startswith(beginnings) for name in events.names] + [False])
    known = {*ops.thread[program[ops.name]].tolist(), *said.thread[program[said.name]].tolist()}
    alone = set(said.thread[backend[said.name]].tolist()) - known
    return ~np.isin(ops.thread, list(alone))


def lies_within(inner: EventTable, rows: Array, outer: EventTable, around: Array) -> Array:
    """Return, for each of these rows of `inner`, whether one of the rows `around` of `outer` has it on its thread."""
    found = np.zeros(len(rows), bool)
    for thread in np.unique(outer.thread[around]).tolist():
        mine = around[outer.thread[around] == thread]
        spans = covered_times(outer.start[mine], outer.end[mine])
        here = inner.thread[rows] == thread
        at = np.searchsorted(spans[:, 0], inner.start[rows], side="right") - 1
        found |= here & (at >= 0) & (inner.start[rows] < spans[np.maximum(at, 0), 1])
    return found


def covered_times(start: Array, end: Array) -> Array:
    """Return the times that at least one event covers, as disjoint intervals, (k, 2)."""
    if not len(start):
        return np.zeros((0, 2), np.int64)
    order = np.argsort(start, kind="stable")
    first, last = start[order], np.maximum.accumulate(end[order])
    begins = np.concatenate([[True], first[1:] > last[:-1]])
    ends = np.concatenate([np.flatnonzero(begins)[1:] - 1, [len(first) - 1]])
    return np.stack([first[begins], last[ends]], axis=1)


def length(intervals: Array) -> int:
    """Return the total length of intervals that do not overlap."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())

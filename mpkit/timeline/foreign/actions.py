"""What a rank's device computes, in actions: pieces of one kind, step, stage and micro-batch; and what bounds them.

On a GPU, kernels compute except for those of NCCL, RCCL and oneCCL, on whatever stream they run. Without a GPU the
operators compute, the outermost ones on the threads of the program, while the backend's own threads communicate.

Pieces of work that follow each other with the same place in the program are one action. In a pipeline whose
program does not say its micro-batches, each send or receive ends an action, and actions of a kind are counted within
their step.

What bounds a kernel tells how other hardware scales it:

    fixed      the first microseconds of every kernel, which no device saves
    product    matrix products, convolutions and attention, by dtype: the operator's, else what the kernel's name says
    memory     everything else; and products of operands that are not aligned, which do not feed the matrix units

Source: Williams, Waterman and Patterson 2009, for the two bounds. H100 and MI300X traces of the same five programs
(AMD-AGI/TraceLens, tests/traces) have 1.5 to 1.6 times as much time in what is memory here, and memories of 1.58 times.
`FIXED` and the products that are called unaligned were chosen with these traces at hand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.timeline.foreign.communication import MESSAGES, Comm
from mpkit.timeline.foreign.kineto import PATTERNS, TABLE, Events
from mpkit.timeline.foreign.phases import place_of
from mpkit.trace import Kind

Array = npt.NDArray[Any]

FIXED = 2_000
"""ns of each kernel that are the same on all devices."""

_TRIVIAL = frozenset(TABLE["trivial"])
_PRODUCTS = [(dtype, re.compile(words)) for dtype, words in TABLE["products"].items()]
_OF_OPERATOR = {1: "float32", 2: "bfloat16", 3: "float8"}  # by the numbers of `EventTable.operand`
_NOT_COMPUTE = ("c10d::", "record_param_comms", "gloo:", "nccl:", "_c10d_functional", "ProfilerStep")
_PROGRAM = ("ProfilerStep#", "Optimizer.", "autograd::", "c10d::", "DistributedDataParallel")


class DeviceWork(NamedTuple):
    """What a rank's device computes, by start.

    Attributes:
        start, end: (n,) ns.
        asked: (n,) ns: when the program asked for it; the start where nothing tells.
        name: (n,) numbers of `Events.names`: the operator, or the kernel where none is known.
        row: (n,) of the kernel's or the operator's table.
    """

    start: Array
    end: Array
    asked: Array
    name: Array
    row: Array


@dataclass
class ProfiledAction:
    """One action.

    Attributes:
        kind, step, stage, microbatch: its place; -1 for none.
        name: the optimizer's class; else "".
        first, last: the rows of `DeviceWork` that it consists of, `last` excluded.
    """

    kind: Kind
    step: int
    stage: int
    microbatch: int
    name: str
    first: int
    last: int


# ---- what is computed


def work_of(events: Events) -> DeviceWork:
    """Return what a rank computes: kernels on a GPU, else the operators of its program."""
    if not events.on_device:
        ops, rows = events["op"], _outermost(events)
        return DeviceWork(ops.start[rows], ops.end[rows], ops.start[rows], ops.name[rows], rows)
    kernel = events["kernel"]
    rows = np.flatnonzero(~events.communicates)
    rows = rows[np.argsort(kernel.start[rows], kind="stable")]
    operator = events.operators("kernel")[rows]
    name = np.where(operator >= 0, np.append(events["op"].name, 0)[operator], kernel.name[rows])
    return DeviceWork(kernel.start[rows], kernel.end[rows], events.asked("kernel")[rows], name, rows)


def _outermost(events: Events) -> Array:
    """Return the rows of the outermost operators on the program's threads, without those that communicate."""
    ops, said = events["op"], events["annotation"]
    apart = np.zeros(len(ops), bool)
    apart[events.named("op", lambda name: name.startswith(_NOT_COMPUTE))] = True
    # A backend works alone on threads of its own.
    program = [
        events[word].thread[events.named(word, lambda name: name.startswith(_PROGRAM))]
        for word in ("op", "annotation")
    ]
    backend = said.thread[events.named("annotation", lambda name: name.startswith(("gloo:", "ucc:", "mpi:")))]
    chosen = np.flatnonzero(~np.isin(ops.thread, np.setdiff1d(backend, np.concatenate(program))))
    chosen = chosen[np.lexsort((-ops.end[chosen], ops.start[chosen], ops.thread[chosen]))]
    columns = (each[chosen].tolist() for each in (ops.thread, ops.start, ops.end, apart))
    keep, last_thread, last_end = [], -1, 0
    for row, thread, start, end, skipped in zip(chosen.tolist(), *columns, strict=True):
        if thread != last_thread or start >= last_end:  # else it is within the one before
            last_thread, last_end = thread, end
            if not skipped:
                keep.append(row)
    rows = np.array(keep, np.int64)
    return rows[np.argsort(ops.start[rows], kind="stable")]


# ---- actions


def actions_of(events: Events, work: DeviceWork, comms: Sequence[Comm]) -> list[ProfiledAction]:
    """Return a rank's actions in order of time, given what it computes and communicates."""
    if not len(work.start):
        return []
    place = place_of(events, work.asked)
    announced = bool((place["microbatch"] >= 0).any())
    messages = np.sort([comm.asked for comm in comms if comm.kind in MESSAGES]).astype(np.int64)
    between = np.searchsorted(messages, work.asked)
    split = np.where(np.isin(place["kind"], (Kind.FORWARD, Kind.BACKWARD)), between, -1) * (not announced)
    keys = np.stack([place["step"], place["kind"], place["stage"], place["microbatch"], split, place["name"]])
    begins = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)]))
    ends = np.append(begins[1:], len(work.start))
    actions = []
    for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
        step, kind, stage, microbatch, _, name = (int(each) for each in keys[:, first])
        words = events.names[name] if name >= 0 else ""
        words = words.removeprefix("Optimizer.step#").removesuffix(".step").strip("# ")
        actions.append(ProfiledAction(Kind(kind), step, stage, microbatch, words, first, last))
    if len(messages) and not announced:
        _count_microbatches(events, work, actions)
    return actions


def _count_microbatches(events: Events, work: DeviceWork, actions: list[ProfiledAction]) -> None:
    """Count the forwards and backwards of each step."""
    trivial = np.array([name.removesuffix("_") in _TRIVIAL for name in events.names] + [False])
    counted: Counter[tuple[int, Kind]] = Counter()
    for action in actions:
        if action.kind not in (Kind.FORWARD, Kind.BACKWARD):
            continue
        real = np.flatnonzero(~trivial[work.name[action.first : action.last]])
        if not len(real):
            action.kind = Kind.COMPUTE
            continue
        action.first += int(real[0])
        action.microbatch = counted[action.step, action.kind]
        counted[action.step, action.kind] += 1


# ---- bounds


def bounds_of(
    events: Events, work: DeviceWork, actions: Sequence[ProfiledAction]
) -> dict[str, dict[str, int]]:
    """Return the ns of kernels by what bounds them, for each kind of action; nothing for a CPU."""
    if not events.on_device:
        return {}
    names, operands = events["kernel"].name[work.row].tolist(), events.operators("kernel")[work.row]
    operand = np.where(operands >= 0, np.append(events["op"].operand, 0)[operands], 0).tolist()
    took, bound_of = (work.end - work.start).tolist(), cache(_bound_of)
    found: dict[str, Counter[str]] = {}
    for action in actions:
        sums = found.setdefault(action.kind.word, Counter())
        for at in range(action.first, action.last):
            fixed = min(took[at], FIXED)
            sums["fixed"] += fixed
            sums[bound_of(events.names[names[at]], operand[at])] += took[at] - fixed
    return {kind: dict(sums) for kind, sums in found.items()}


def _bound_of(kernel: str, operand: int) -> str:
    """Return what bounds a kernel: "memory", or the dtype of a product."""
    if not PATTERNS["product"].search(kernel) or PATTERNS["unaligned"].search(kernel):
        return "memory"
    named = next(dtype for dtype, words in _PRODUCTS if words.search(kernel))
    dtype = _OF_OPERATOR.get(operand, named)
    return str(named if dtype == "float32" and named == "tfloat32" else dtype)

"""What a rank's device computes, in actions: pieces of one kind, step, stage and micro-batch; and what bounds them.

On a GPU, kernels compute except for those of NCCL, RCCL and oneCCL, on whatever stream they run. Without a GPU the
operators compute, the outermost ones on the threads of the program, while the backend's own threads communicate.
What the program was doing when it asked for a piece is its place:

    steps          `ProfilerStep#4` of torch.profiler's schedule; without any, a step ends with the last optimizer's
    pipelines      `PP:2F0` of torch.distributed.pipelining: stage, action, micro-batch; `Forward 0` of its GPipe
    optimizer      `Optimizer.step#AdamW.step`, which every optimizer of torch announces; or an annotation of the user's
    backward       what autograd's engine evaluates, and annotations that say backward
    recomputation  operators within a backward that autograd records again
    forward        annotations that say forward, and what else comes before a backward of the same step

Pieces that follow each other with the same place are one action. In a pipeline whose program does not say its
micro-batches, each send or receive ends an action, and actions of a kind are counted within their step.

What bounds a kernel tells how other hardware scales it:

    fixed      the first microseconds of every kernel, which no device saves
    product    matrix products, convolutions and attention, by dtype: the operator's, else what the kernel's name says
    memory     everything else; and products of operands that are not aligned, which do not feed the matrix units

Source: Williams, Waterman and Patterson 2009, for the two bounds. H100 and MI300X traces of the same five programs
(AMD-AGI/TraceLens, tests/traces) have 1.5 to 1.6 times as much time in what is memory here, and memories of 1.58 times.
`FIXED` and the products that are called unaligned were chosen with these traces at hand.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mpkit.common.arrays import Array
from mpkit.timeline.foreign.communication import MESSAGES, Comm
from mpkit.timeline.foreign.kineto import PATTERNS, TABLE, Events, EventTable
from mpkit.timeline.metrics import covered
from mpkit.trace import Kind

PLACE = np.dtype([("step", "<i8"), ("kind", "u1"), ("stage", "<i4"), ("microbatch", "<i4"), ("name", "<i8")])
"""Where a program was. `name` is a number of `Events.names`, -1: none."""

_ACTIONS = {
    "F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRAD, "W": Kind.WEIGHT_GRAD,
    "BACKWARD_INPUT": Kind.INPUT_GRAD, "BACKWARD_WEIGHT": Kind.WEIGHT_GRAD,
    "Forward": Kind.FORWARD, "Backward": Kind.BACKWARD,
}  # fmt: skip
_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.RECOMPUTE)


def place_of(events: Events, asked: Array) -> Array:
    """Return (n,) of `PLACE` for (n,) times in ns at which a rank's program asked for something."""
    place = np.zeros(len(asked), PLACE)
    for name in ("step", "stage", "microbatch", "name"):
        place[name] = -1
    said, ops = events["annotation"], events["op"]
    words = [events.names[number] for number in said.name.tolist()]
    lower = [word.lower() for word in words]

    def mark(rows: Any, kind: Kind | None = None, table: EventTable = said) -> tuple[Array, Array]:
        """Return which times lie in one of these annotations, and in which; set their kind."""
        here, which = _find_inside(asked, table.start[rows], table.end[rows])
        place["kind"][here] = place["kind"][here] if kind is None else kind
        return here, np.array(rows, np.int64)[which] if len(rows) else which

    def saying(*, yes: str, no: str = "\n") -> list[int]:
        return [i for i, word in enumerate(lower) if yes in word and no not in word]

    # ---- phases: what is more specific overrules what is less
    mark(saying(yes="forward", no="backward"), Kind.FORWARD)
    mark(saying(yes="zero_grad"), Kind.COMPUTE)
    mark(_engine_rows(events), Kind.BACKWARD, ops)
    mark([i for i in saying(yes="backward") if not lower[i].startswith("pp:")], Kind.BACKWARD)
    here, _ = mark(_recomputed_rows(events), table=ops)
    place["kind"][here & (place["kind"] == Kind.BACKWARD)] = Kind.RECOMPUTE
    optimizers = [i for i, word in enumerate(lower) if _updates(word)]
    here, which = mark(optimizers, Kind.OPTIMIZER)
    place["name"][here] = said.name[which[here]]
    # ---- stages and micro-batches
    matches = ((i, PATTERNS["pipeline"].match(w) or PATTERNS["chunk"].match(w)) for i, w in enumerate(words))
    actions = {i: found for i, found in matches if found}
    here, which = mark(list(actions))
    for at in np.flatnonzero(here).tolist():
        found = actions[int(which[at])]
        kind = _ACTIONS[found[found.re.groups - 1]]
        place["microbatch"][at] = int(found[found.re.groups])
        place["stage"][at] = int(found[1]) if found.re is PATTERNS["pipeline"] else -1
        if place["kind"][at] != Kind.RECOMPUTE or kind == Kind.FORWARD:
            place["kind"][at] = kind
    # ---- steps
    numbers = profiled_steps(events)
    here, which = mark(list(numbers))
    place["step"][here] = [numbers[int(row)] for row in which[here]]
    if numbers:
        place["step"][here & np.isin(which, cut_steps(events))] = -1
    else:
        place["step"] = _counted_steps(events, said.end[optimizers], asked)
    _mark_rest(events, asked, place)
    return place


def _find_inside(times: Array, start: Array, end: Array) -> tuple[Array, Array]:
    """Return which times lie within one of the intervals, and in which one: of several, the one that began last."""
    if not len(start):
        return np.zeros(len(times), bool), np.zeros(len(times), np.int64)
    order = np.argsort(start, kind="stable")
    at = np.maximum(np.searchsorted(start[order], times, side="right") - 1, 0)
    spans = covered(start, end)
    around = np.maximum(np.searchsorted(spans[:, 0], times, side="right") - 1, 0)
    return (times >= spans[around, 0]) & (times < spans[around, 1]), order[at]


def _engine_rows(events: Events) -> Array:
    """Return the operators in which autograd's engine evaluates a node; torch 1.8 has the nodes alone."""
    return events.named("op", PATTERNS["node"].match)


def _recomputed_rows(events: Events) -> Array:
    """Return the operators that autograd records while its engine evaluates a node: those of a forward run again.

    Functions written in Python are recorded in backwards, too, as those by which DTensor changes a layout.
    """
    ops = events["op"]
    rows = events.named("op", lambda name: name.startswith("aten::"))
    rows, around = rows[ops.records[rows] == 1], _engine_rows(events)
    within = np.zeros(len(rows), bool)
    for thread in np.unique(ops.thread[around]).tolist():
        mine = around[ops.thread[around] == thread]
        inside, _ = _find_inside(ops.start[rows], ops.start[mine], ops.end[mine])
        within |= (ops.thread[rows] == thread) & inside
    return np.asarray(rows[within])


def profiled_steps(events: Events) -> dict[int, int]:
    """Return the number of each step that torch.profiler announces, by the row of its annotation."""
    table, step = events["annotation"], PATTERNS["step"]
    rows = events.named("annotation", step.match).tolist()
    return {row: int(found[1]) for row in rows if (found := step.match(events.names[table.name[row]]))}


def cut_steps(events: Events) -> list[int]:
    """Return the row of the last step's annotation if recording ended within that step; else nothing.

    Such a step takes less than half the time of a usual one, and has less than half its calls, or no update where each
    other step has one.
    """
    said, ops = events["annotation"], events["op"]
    rows = sorted(profiled_steps(events), key=lambda row: int(said.start[row]))
    if len(rows) < 2:
        return []

    def count(starts: Array, row: int) -> int:
        return int(np.count_nonzero((starts >= said.start[row]) & (starts < said.end[row])))

    *before, last = rows
    took = np.median([said.end[row] - said.start[row] for row in before])
    if 2 * (said.end[last] - said.start[last]) >= took:
        return []
    updates = said.start[events.named("annotation", lambda name: _updates(name.lower()))]
    fewer = 2 * count(ops.start, last) < np.median([count(ops.start, row) for row in before[-5:]])
    no_update = not count(updates, last) and all(count(updates, row) for row in before)
    return [last] if fewer or no_update else []


def _updates(annotation: str) -> bool:
    """Say whether an annotation, in lower case, is around an optimizer's step."""
    return annotation.startswith("optimizer.step#") or annotation.strip("# ") == "optimizer"


def _counted_steps(events: Events, updated: Array, asked: Array) -> Array:
    """Return the step of each time if none is announced: a step ends with the last of its updates.

    After the last update there is no step: recording ended within it.
    """
    backward = np.sort(events["op"].start[_engine_rows(events)])
    none: Array = np.full(len(asked), -1)
    if not len(updated) or not len(backward):
        return none
    ends = np.sort(updated)
    made = np.searchsorted(backward, ends)  # with no backward between two updates they are of one step
    ends = ends[np.append(made[1:] > made[:-1], True)]
    step = np.searchsorted(ends, asked)
    return np.where(step < len(ends), step, none)


def _mark_rest(events: Events, asked: Array, place: Array) -> None:
    """Give the rest a phase, by what comes before and after it in its step (`_phase_between`)."""
    order = np.argsort(asked, kind="stable")
    kind, step = place["kind"][order], place["step"][order]
    unknown, known = kind == 0, np.flatnonzero(kind)
    backward = np.isin(kind, _BACKWARDS)
    if not backward.any():
        kind[unknown] = Kind.COMPUTE if len(known) else Kind.FORWARD
    else:
        ops = events["op"]
        recorded, _ = _find_inside(asked[order], ops.start[ops.records == 1], ops.end[ops.records == 1])
        another = np.diff(step, prepend=step[:1]) != 0
        begins = np.flatnonzero(unknown & (another | ~np.concatenate([[False], unknown[:-1]])))
        over = np.concatenate([~unknown[1:] | another[1:], [True]])
        phases = np.flatnonzero((kind != 0) & (kind != Kind.COMPUTE))
        for first, last in zip(begins.tolist(), (np.flatnonzero(unknown & over) + 1).tolist(), strict=True):
            at = int(np.searchsorted(phases, first))
            near = [phases[i] if 0 <= i < len(phases) else -1 for i in (at - 1, at)]
            before, after = (Kind(int(kind[i])) if i >= 0 and step[i] == step[first] else None for i in near)
            kind[first:last] = _phase_between(before, after, bool(recorded[first:last].any()))
    place["kind"][order] = kind


def _phase_between(before: Kind | None, after: Kind | None, recorded: bool) -> Kind:
    """Return the phase of work between two phases of its step; `recorded`: whether autograd records it.

    Before a backward it belongs to the forward, between two backwards to the backward unless autograd records it;
    before a forward that an annotation begins it is other work, as is everything else.
    """
    if after == Kind.FORWARD:
        return Kind.FORWARD if before == Kind.FORWARD or (before is not None and recorded) else Kind.COMPUTE
    if after not in _BACKWARDS:
        return Kind.COMPUTE
    return Kind.BACKWARD if before in _BACKWARDS and not recorded else Kind.FORWARD


FIXED = 2_000
"""ns of each kernel that are the same on all devices."""

_TRIVIAL = frozenset(TABLE["trivial"])
_PRODUCTS = [(dtype, re.compile(words)) for dtype, words in TABLE["products"].items()]
_OF_OPERATOR = {1: "float32", 2: "bfloat16", 3: "float8"}  # by the numbers of `EventTable.operand`
_NOT_COMPUTE = ("c10d::", "record_param_comms", "gloo:", "nccl:", "_c10d_functional", "ProfilerStep")
_PROGRAM = ("ProfilerStep#", "Optimizer.", "autograd::", "c10d::", "DistributedDataParallel")


class DeviceWork(NamedTuple):
    """What a rank's device computes, by start: (n,) arrays."""

    start: Array  # ns
    end: Array
    asked: Array  # ns, when the program asked for it; its start if that is unknown
    name: Array  # the number in `Events.names` of the operator, or of the kernel if no operator is known
    row: Array  # in the kernel's or the operator's table


@dataclass
class ProfiledAction:
    """One action; -1 for no step, stage or micro-batch."""

    kind: Kind
    step: int
    stage: int
    microbatch: int
    name: str  # the optimizer's class; else ""
    first: int  # rows of `DeviceWork`, `last` excluded
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
    """Return a rank's actions in order of time."""
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
    for action in (each for each in actions if each.kind in (Kind.FORWARD, Kind.BACKWARD)):
        real = np.flatnonzero(~trivial[work.name[action.first : action.last]])
        if not len(real):
            action.kind = Kind.COMPUTE
            continue
        action.first += int(real[0])
        action.microbatch = counted[action.step, action.kind]
        counted[action.step, action.kind] += 1


# ---- bounds


Bounds = dict[str, dict[str, int]]


def bounds_of(events: Events, work: DeviceWork, actions: Sequence[ProfiledAction]) -> Bounds:
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

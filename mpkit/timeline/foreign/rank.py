"""One rank's events as the records of a Trace.

    actions     forwards, backwards, optimizer steps: outermost ops of the compute lane
    layers      within an action, what its kernels or operators are called
    waits       where the compute lane stands still: for a communication that ends just then, or on a GPU for its host
    comm        communications, with group and number, as replays match them
    copies      between device and host; and the time in which a DataLoader is asked for the next batch
    memory      the allocator's events

A gap that ends with a communication is a wait for it. Of the other gaps, those within an action of a GPU are waits for
its host, which has not launched the next kernel yet; between actions a gap is only idle time. A communication that
nobody waited for was over in time. Its result was needed by the next work of another kind at the latest, so there
stands a wait of no length: on a slower link it becomes one.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpkit.common.arrays import Array
from mpkit.timeline.foreign.actions import (
    DeviceWork,
    ProfiledAction,
    actions_of,
    bounds_of,
    place_of,
    work_of,
)
from mpkit.timeline.foreign.communication import MESSAGES, Comm
from mpkit.timeline.foreign.kineto import Events
from mpkit.timeline.metrics import covered, length
from mpkit.trace import CATEGORIES, MEMORY, OP, SENT_PART, Kind, RankTrace, lane_of

MOST = 20_000
"""Layers, and likewise waits, of one rank: of more, the shortest are left out."""

_ENGINE = "autograd::engine::evaluate_function: "


class OpRow(NamedTuple):
    """An op in the making."""

    start: int
    end: int
    kind: Kind
    depth: int = 0
    step: int = -1
    stage: int = -1
    microbatch: int = -1
    name: str = ""
    group: str = ""
    number: int = -1
    peer: int = -1
    nbytes: int = 0
    busy: int = 0
    ref: int = -1  # the row of the communication that a wait is for
    still: float = 0.0  # seconds for which an action waits for its host
    parts: tuple[int, ...] = ()  # the bytes for each member of an all-to-all


def rank_trace(
    events: Events, comms: Sequence[Comm], index: Mapping[int, int], mine: int, shift: int
) -> tuple[RankTrace, dict[str, dict[str, int]]]:
    """Return the records of one rank, and its ns of kernels by what bounds them (`bounds_of`).

    `index` has the number in the Trace of each rank that has a file, `mine` that of this rank; `shift` ns are added to
    its times.
    """
    work = work_of(events)
    actions = actions_of(events, work, comms)
    rows = [*_collectives(events, comms, index, mine), *_actions(events, work, actions)]
    rows += _longest(_waits(rows, work, actions, on_device=events.on_device), MOST)
    rows += [*_copies(events), *_loading_times(events)]
    rows += _steps(rows)
    return _write(events, rows, shift), bounds_of(events, work, actions)


# ---- rows


def group_of(comm: Comm, index: Mapping[int, int], mine: int) -> str:
    """Return the name of a communication's group: the numbers of its ranks that there are files of."""
    here = sorted(index[rank] for rank in comm.members if rank in index)
    return ",".join(map(str, here if mine in here else [mine]))


def _collectives(
    events: Events, comms: Sequence[Comm], index: Mapping[int, int], mine: int
) -> Iterator[OpRow]:
    place = place_of(events, np.array([comm.asked for comm in comms], np.int64))
    groups: dict[int, tuple[str, int, int]] = {}  # with the number in the group, and the peer
    counted: Counter[str] = Counter()
    for at in sorted(range(len(comms)), key=lambda i: comms[i].asked):
        comm = comms[at]
        kind, group, peer = comm.kind, group_of(comm, index, mine), -1
        if 0 <= comm.peer < len(comm.members):
            peer = index.get(comm.members[comm.peer], -1)
        if kind in MESSAGES and peer >= 0:
            group = f"{mine}>{peer}#0" if kind == Kind.SEND else f"{peer}>{mine}#0"
        groups[at] = group, counted[group], peer
        counted[group] += 1
    for at, (comm, where) in enumerate(zip(comms, place, strict=True)):
        parts: tuple[int, ...] = ()
        if all(rank in index for rank in comm.members):  # the bytes for each, by its number in the Trace
            numbered = sorted(zip((index[rank] for rank in comm.members), comm.parts, strict=False))
            parts = tuple(nbytes for _, nbytes in numbered)
        name = f"{comm.dtype}[{comm.elements}]" if comm.elements else comm.name
        numbers = int(where["step"]), int(where["stage"]), int(where["microbatch"])
        yield OpRow(comm.start, comm.end, comm.kind, 0, *numbers, name, *groups[at], comm.nbytes, parts=parts)


def _actions(events: Events, work: DeviceWork, actions: Sequence[ProfiledAction]) -> Iterator[OpRow]:
    """Yield the actions, none of which begins before the one before it has ended, and their layers."""
    fine, before = len(work.start) <= MOST, 0
    for action in actions:
        starts, ends = work.start[action.first : action.last], work.end[action.first : action.last]
        start = max(int(starts[0]), before)
        end = before = max(int(ends.max()), start)
        busy = end - start
        if events.on_device:  # work of another stream may have ended before this action begins
            own = covered(np.maximum(starts, start), np.maximum(ends, start))
            busy = min(int(length(own)), busy) or busy
        place = action.step, action.stage, action.microbatch
        yield OpRow(start, end, action.kind, 0, *place, action.name, busy=busy)
        if not fine:
            continue
        names = work.name[action.first : action.last]
        begins = action.first + np.flatnonzero(np.concatenate([[True], names[1:] != names[:-1]]))
        at = start
        for first, last in pairwise([*begins.tolist(), action.last]):  # layers: runs of work of the same name
            start, at = max(int(work.start[first]), at), max(int(work.end[first:last].max()), at)
            name = events.names[work.name[first]].removeprefix(_ENGINE)
            yield OpRow(start, at, action.kind, 1, *place, name)


def _copies(events: Events) -> Iterator[OpRow]:
    """Yield the copies between device and host; a copy within the device computes nothing."""
    copy = events["copy"]
    for at, step in enumerate(place_of(events, events.asked("copy"))["step"].tolist()):
        name = events.names[copy.name[at]]
        kind = Kind.COPY_TO_DEVICE if "HtoD" in name else Kind.COPY_TO_HOST if "DtoH" in name else None
        if kind is not None:
            times = int(copy.start[at]), int(copy.end[at])
            yield OpRow(*times, kind, step=step, name=name, nbytes=int(copy.nbytes[at]))


def _loading_times(events: Events) -> Iterator[OpRow]:
    """Yield the times in which a DataLoader was asked for the next batch."""
    said = events["annotation"]
    loads = events.named("annotation", lambda name: name.startswith("enumerate(DataLoader)"))
    for at, step in zip(loads.tolist(), place_of(events, said.start[loads])["step"].tolist(), strict=True):
        yield OpRow(int(said.start[at]), int(said.end[at]), Kind.DATA, step=step)


def _steps(rows: Sequence[OpRow]) -> list[OpRow]:
    bounds: dict[int, tuple[int, int]] = {}
    for row in rows:
        if row.step >= 0:
            start, end = bounds.get(row.step, (row.start, row.end))
            bounds[row.step] = min(start, row.start), max(end, row.end)
    return [OpRow(start, end, Kind.STEP, step=step) for step, (start, end) in bounds.items()]


# ---- waits


def _waits(
    rows: list[OpRow], work: DeviceWork, actions: Sequence[ProfiledAction], *, on_device: bool
) -> list[OpRow]:
    """Return the waits of one rank; set in `rows` how long each action stands still for its host."""
    comms = sorted((i for i, row in enumerate(rows) if 32 <= row.kind < 64), key=lambda i: rows[i].end)
    ends = [rows[i].end for i in comms]
    places = [i for i, row in enumerate(rows) if row.kind < Kind.WAIT and row.depth == 0]
    outer = [rows[i] for i in places]
    found: list[OpRow] = []
    waited: set[int] = set()

    def gap(start: int, end: int, row: OpRow, depth: int) -> None:
        """Add the waits of a gap before the action `row` (depth 0) or within it."""
        low, high = bisect_right(ends, start), bisect_right(ends, end)
        place = depth, row.step, row.stage, row.microbatch
        at = start
        if high > low:
            comm = comms[high - 1]
            begin = max(start, rows[comm].start)
            if depth and on_device and begin > at:
                found.append(OpRow(at, begin, Kind.WAIT, *place))
            at = rows[comm].end
            found.append(OpRow(begin, at, Kind.WAIT, *place, ref=comm))
            waited.add(comm)
        if depth and on_device and end > at:
            found.append(OpRow(at, end, Kind.WAIT, *place))

    for action, row, place in zip(actions, outer, places, strict=True):
        start, end = work.start[action.first : action.last], work.end[action.first : action.last]
        reached, before = np.maximum.accumulate(np.maximum(end, row.start)), len(found)
        for at in np.flatnonzero(start[1:] > reached[:-1]).tolist():
            gap(int(reached[at]), int(start[at + 1]), row, 1)
        still = sum(wait.end - wait.start for wait in found[before:] if wait.ref < 0)
        rows[place] = row._replace(still=still * 1e-9)
    for earlier, row in pairwise(outer):
        if row.start > earlier.end:
            gap(earlier.end, row.start, row, 0)
    return found + _at_the_latest(rows, outer, set(comms) - waited)


def _at_the_latest(rows: Sequence[OpRow], outer: Sequence[OpRow], left: set[int]) -> list[OpRow]:
    """Return waits of no length, where the next work of another kind or step begins."""
    starts, found = [row.start for row in outer], []
    for comm in sorted(left) if outer else ():
        row = rows[comm]
        if row.kind == Kind.SEND:
            continue
        at = bisect_left(starts, row.end)
        now = outer[max(bisect_right(starts, row.start) - 1, 0)]
        same = now.kind, now.step
        while row.kind != Kind.RECV and at < len(outer) and (outer[at].kind, outer[at].step) == same:
            at += 1
        for then in outer[at : at + 1]:
            place = 0, then.step, then.stage, then.microbatch
            found.append(OpRow(then.start, then.start, Kind.WAIT, *place, ref=comm))
    return found


def _longest(waits: Sequence[OpRow], most: int) -> list[OpRow]:
    """Return all waits for communications, and the `most` longest waits for the host."""
    idle = sorted((wait.end - wait.start for wait in waits if wait.ref < 0), reverse=True)
    shortest = idle[most] if len(idle) > most else -1
    return [wait for wait in waits if wait.ref >= 0 or wait.end - wait.start > shortest]


# ---- records


def _write(events: Events, rows: Sequence[OpRow], shift: int) -> RankTrace:
    columns: dict[str, list[Any]] = {name: [row[at] for row in rows] for at, name in enumerate(OpRow._fields)}
    start, end, kind, depth = (
        np.array(columns[name], np.int64) for name in ("start", "end", "kind", "depth")
    )
    order = np.lexsort((-end, depth, kind == Kind.WAIT, kind != Kind.STEP, start))
    place = np.full(len(rows) + 1, -1)  # the last one is of row -1: no communication
    place[order] = np.arange(len(rows))
    names: dict[str, int] = {"": 0}
    ops = np.zeros(len(rows), OP)
    for name in ("kind", "depth", "step", "stage", "microbatch", "number", "peer", "nbytes", "busy"):
        ops[{"nbytes": "bytes", "busy": "cpu"}.get(name, name)] = columns[name]
    for name in ("name", "group"):
        ops[name] = [names.setdefault(word, len(names)) for word in columns[name]]
    ops["lane"], ops["ref"] = [lane_of(each) for each in columns["kind"]], place[columns["ref"]]
    ops["start"], ops["end"] = start + shift, np.maximum(start, end) + shift
    ops["value"] = np.where(kind == Kind.STEP, np.nan, columns["still"])
    ops = ops[order]
    ops["ref"] = np.where(ops["ref"] < np.arange(len(ops)), ops["ref"], -1)
    parts = sorted(
        (int(place[at]), member, nbytes)
        for at, sent in enumerate(columns["parts"])
        for member, nbytes in enumerate(sent)
        if nbytes
    )
    return RankTrace(ops, _memory(events, ops, shift), list(names), sent_parts=np.array(parts, SENT_PART))


def _memory(events: Events, ops: Array, shift: int) -> Array:
    """Return the allocator's events, the accelerator's if it has any; no file tells what the memory is for."""
    kinds = events.memory[:, 2]  # c10::DeviceType: 0 is the host, 1 CUDA, 6 HIP, 12 XPU, 19 MTIA
    if events.on_device and not (kinds > 0).any():  # of the host only: nothing is known of the GPU's memory
        kinds = kinds[:0]
    away = kinds[kinds > 0]
    changes = events.memory[: len(kinds)][kinds == (np.bincount(away).argmax() if len(away) else 0)]
    changes = changes[np.argsort(changes[:, 0], kind="stable")]
    memory = np.zeros(len(changes), MEMORY)
    memory["time"], memory["delta"] = changes[:, 0] + shift, changes[:, 1]
    memory["op"] = np.searchsorted(ops["start"], memory["time"], side="right")
    memory["category"] = CATEGORIES.index("buffers")
    if len(changes) and changes[0, 3] >= 0:  # what was held already
        memory["delta"][0] = changes[0, 3]
    return memory

"""One rank's events as the records of a Trace.

actions     forwards, backwards, optimizer steps: outermost ops of the compute lane
layers      within an action, what its kernels or operators are called
waits       where the compute lane stands still: for a communication that ends just then, or on a GPU for its host
comm        communications, with group and number, as replays match them
copies      between device and host; and the time in which a DataLoader is asked for the next batch
memory      the allocator's events
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from mpkit.timeline.foreign.actions import ProfiledAction, actions_of
from mpkit.timeline.foreign.bounds import bounds_of
from mpkit.timeline.foreign.communication import Comm
from mpkit.timeline.foreign.lanes import DeviceWork, covered_times, length, work_of
from mpkit.timeline.foreign.op_rows import OpRow, write_rank
from mpkit.timeline.foreign.phases import place_of
from mpkit.timeline.foreign.reading.events import Events
from mpkit.timeline.foreign.waits import longest, waits_of
from mpkit.trace import Kind, RankTrace

__all__ = ["MOST", "rank_trace"]

MOST = 20_000
"""Layers, and likewise waits, of one rank: of more, the shortest are left out."""

_ENGINE = "autograd::engine::evaluate_function: "


def rank_trace(
    events: Events, comms: Sequence[Comm], index: Mapping[int, int], mine: int, shift: int
) -> tuple[RankTrace, dict[str, dict[str, int]]]:
    """Return the records of one rank, and its ns of kernels by what bounds them (`bounds_of`).

    Args:
        events: its events.
        comms: its communications.
        index: of the ranks that there are files of, each one's number in the Trace.
        mine: this rank's number in the Trace.
        shift: ns that are added to its times.
    """
    work = work_of(events)
    actions = actions_of(events, work, comms)
    rows = _collectives(events, comms, index, mine)
    rows += _actions(events, work, actions)
    waits = waits_of(OpRow, rows, work, actions, on_device=events.on_device)
    if events.on_device:
        rows = _with_stillness(rows, waits)
    rows += longest(waits, MOST)
    rows += [*_copies(events), *_loading_times(events)]
    rows += _steps(rows)
    return write_rank(events, rows, shift), bounds_of(events, work, actions)


# ---- rows


def _collectives(events: Events, comms: Sequence[Comm], index: Mapping[int, int], mine: int) -> list[OpRow]:
    place = place_of(events, np.array([comm.asked for comm in comms], np.int64))
    numbers: dict[int, tuple[str, int, int]] = {}
    counted: Counter[str] = Counter()
    for at in sorted(range(len(comms)), key=lambda i: comms[i].asked):
        call, kind = comms[at].call, comms[at].kind
        here = sorted(index[rank] for rank in call.members if rank in index)
        group, peer = ",".join(map(str, here if mine in here else [mine])), -1
        if 0 <= call.peer < len(call.members):
            peer = index.get(call.members[call.peer], -1)
        if kind in (Kind.SEND, Kind.RECV) and peer >= 0:
            group = f"{mine}>{peer}#0" if kind == Kind.SEND else f"{peer}>{mine}#0"
        numbers[at] = group, counted[group], peer
        counted[group] += 1
    return [
        OpRow(comm.start, comm.end, comm.kind, 0, int(where["step"]), int(where["stage"]), int(where["microbatch"]),
            _spelt(comm), numbers[at][0], numbers[at][1], numbers[at][2], comm.call.nbytes, parts=_parts(comm, index))
        for at, (comm, where) in enumerate(zip(comms, place, strict=True))
    ]  # fmt: skip


def _parts(comm: Comm, index: Mapping[int, int]) -> tuple[int, ...]:
    """Return the bytes for each rank of the group, by its number in the Trace; none if a rank has no file."""
    call = comm.call
    if not all(rank in index for rank in call.members):
        return ()
    by_number = sorted(zip((index[rank] for rank in call.members), call.parts, strict=False))
    return tuple(nbytes for _, nbytes in by_number)


def _spelt(comm: Comm) -> str:
    call = comm.call
    return f"{call.dtype}[{call.elements}]" if call.elements else comm.name


def _actions(events: Events, work: DeviceWork, actions: Sequence[ProfiledAction]) -> list[OpRow]:
    """Return the actions, none of which begins before the one before it has ended, and their layers."""
    rows: list[OpRow] = []
    fine, before = len(work.start) <= MOST, 0
    for action in actions:
        start = max(int(work.start[action.first]), before)
        ends = work.end[action.first : action.last]
        end = max(int(ends.max()), start)
        starts = work.start[action.first : action.last]
        # Work of another stream may have ended before this action begins.
        seen = np.maximum(starts, start), np.maximum(ends, start)
        busy = length(covered_times(*seen)) if events.on_device else 0
        place = action.step, action.stage, action.microbatch
        rows.append(
            OpRow(start, end, action.kind, 0, *place, action.name, busy=min(busy, end - start) or end - start)
        )
        before = end
        if fine:
            rows += _layers(events, work, action, start)
    return rows


def _with_stillness(rows: Sequence[OpRow], waits: Sequence[OpRow]) -> list[OpRow]:
    """Return the rows, each action with the time in which it waits for its host."""
    still = [wait for wait in waits if wait.ref < 0]
    starts = np.array([wait.start for wait in still], np.int64)
    sums = np.concatenate([[0], np.cumsum([wait.end - wait.start for wait in still])])
    order = np.argsort(starts, kind="stable")
    assert (order == np.arange(len(order))).all(), "waits for the host are in order of time"

    def still_of(row: OpRow) -> float:
        return float(sums[np.searchsorted(starts, row.end)] - sums[np.searchsorted(starts, row.start)]) * 1e-9

    return [
        row._replace(still=still_of(row)) if row.kind < Kind.WAIT and not row.depth else row for row in rows
    ]


def _layers(events: Events, work: DeviceWork, action: ProfiledAction, start: int) -> list[OpRow]:
    """Return runs of work of the same name within an action."""
    names = work.name[action.first : action.last]
    begins = action.first + np.flatnonzero(np.concatenate([[True], names[1:] != names[:-1]]))
    rows, before = [], start
    for first, last in zip(begins.tolist(), [*begins[1:].tolist(), action.last], strict=True):
        end = max(int(work.end[first:last].max()), before)
        begin = max(int(work.start[first]), before)
        name = events.names[work.name[first]].removeprefix(_ENGINE)
        rows.append(OpRow(begin, end, action.kind, 1, action.step, action.stage, action.microbatch, name))
        before = end
    return rows


def _copies(events: Events) -> list[OpRow]:
    """Return the copies between device and host; those within the device compute nothing and are left out."""
    copy = events["copy"]
    launch = events.launches("copy")
    asked = np.where(launch >= 0, np.append(events["call"].start, 0)[launch], copy.start)
    steps = place_of(events, asked)["step"]
    rows = []
    for at, step in enumerate(steps.tolist()):
        name = events.names[copy.name[at]]
        kind = Kind.COPY_TO_DEVICE if "HtoD" in name else Kind.COPY_TO_HOST if "DtoH" in name else None
        if kind is not None:
            rows.append(
                OpRow(
                    int(copy.start[at]),
                    int(copy.end[at]),
                    kind,
                    step=step,
                    name=name,
                    nbytes=int(copy.nbytes[at]),
                )
            )
    return rows


def _loading_times(events: Events) -> list[OpRow]:
    """Return the times in which a DataLoader was asked for the next batch."""
    said = events["annotation"]
    loads = np.flatnonzero(
        np.array([name.startswith("enumerate(DataLoader)") for name in events.names] + [False])[said.name]
    )
    steps = place_of(events, said.start[loads])["step"]
    return [
        OpRow(int(said.start[at]), int(said.end[at]), Kind.DATA, step=step)
        for at, step in zip(loads.tolist(), steps.tolist(), strict=True)
    ]


def _steps(rows: Sequence[OpRow]) -> list[OpRow]:
    """Return a record for each step, from its first op to the end of its last."""
    bounds: dict[int, tuple[int, int]] = {}
    for row in rows:
        if row.step >= 0:
            start, end = bounds.get(row.step, (row.start, row.end))
            bounds[row.step] = min(start, row.start), max(end, row.end)
    return [OpRow(start, end, Kind.STEP, step=step) for step, (start, end) in bounds.items()]

"""The communications of one rank, from whatever its file has of them.

kernels        of NCCL on a GPU: the metadata is on the kernel, or on the `record_param_comms` that launched it
operators      of c10d on a CPU: issued by the operator, carried out where the backend's annotation is (`gloo:...`)
annotations    alone, where there is neither: `nccl:all_to_all` of a run whose kernels were not recorded
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.foreign.collectives import CollectiveCall, call_of, ends_of, kind_of, payload_of_shapes
from mpkit.timeline.foreign.lanes import communication_kernels
from mpkit.timeline.foreign.rank_identity import RankIdentity
from mpkit.timeline.foreign.reading.events import Events
from mpkit.timeline.foreign.reading.sound_event import whole_of
from mpkit.trace import Kind

__all__ = ["Comm", "communications"]

Array = npt.NDArray[Any]
BACKENDS = ("gloo:", "nccl:", "rccl:", "ucc:", "xccl:", "mpi:")


@dataclass
class Comm:
    """One communication of one rank.

    Attributes:
        call: what it is; its kind is known.
        start, end: ns, when it was under way.
        asked: ns, when the program issued it.
        name: what the file calls it.
    """

    call: CollectiveCall
    start: int
    end: int
    asked: int
    name: str

    @property
    def kind(self) -> Kind:
        """What it does."""
        assert self.call.kind is not None
        return self.call.kind


def communications(events: Events, about: RankIdentity) -> list[Comm]:
    """Return a rank's communications by start."""
    found = list(_of_kernels(events, about)) if events.on_device else list(_of_operators(events, about))
    return sorted(found, key=lambda comm: (comm.start, comm.end))


# ---- kernels


def _of_kernels(events: Events, about: RankIdentity) -> Iterator[Comm]:
    kernel, calls = events["kernel"], events["call"]
    launch = events.launches("kernel")
    said = _NamedEvents(events, "op", "record_param_comms")
    annotated = _NamedEvents(events, "annotation", *BACKENDS)
    for row in np.flatnonzero(communication_kernels(events)).tolist():
        name = events.names[kernel.name[row]]
        start, call_row = int(kernel.start[row]), int(launch[row])
        asked = int(calls.start[call_row]) if call_row >= 0 else start
        thread = int(calls.thread[call_row]) if call_row >= 0 else -1
        around, label = said.args(thread, asked), annotated.row(thread, asked)
        metadata = kernel.args.get(row) or around or {}
        call = call_of(metadata, about.groups, about.axes)
        words = events.names[events["annotation"].name[label]] if label >= 0 else ""
        if call.kind is None and metadata.get("Collective name"):
            continue  # a wait, or something else that moves nothing
        if call.kind is None or kind_of(words) in (Kind.SEND, Kind.RECV):
            call = _without_metadata(events, call, words or name, label, about)
        if call.kind is None:
            _count(events, "communication of unknown kind, left out")
            continue
        if not metadata and len(about.world) > 2:
            _count(events, "communication that names no group, taken for one among all ranks")
        if len(call.members) != 1 or metadata:
            yield Comm(
                call,
                start,
                int(kernel.end[row]),
                asked,
                words or str(metadata.get("Collective name", "")) or name,
            )


def _without_metadata(
    events: Events, call: CollectiveCall, words: str, label: int, about: RankIdentity
) -> CollectiveCall:
    """Return the communication that an annotation or the kernel's own name tells."""
    args = events["annotation"].args.get(label, {}) if label >= 0 else {}
    nbytes, elements, dtype = payload_of_shapes(args)
    ends, kind = ends_of(words), kind_of(words)
    peer = call.peer if ends is None else ends[1] if kind == Kind.SEND else ends[0]
    return call._replace(
        kind=kind, nbytes=call.nbytes or nbytes, elements=call.elements or elements, dtype=call.dtype or dtype,
        peer=peer, members=call.members or about.world,
    )  # fmt: skip


def _count(events: Events, what: str) -> None:
    events.assumed[what] = events.assumed.get(what, 0) + 1


class _NamedEvents:
    """The events of a table whose names begin in one of these ways, found by thread and time."""

    def __init__(self, events: Events, word: str, *beginnings: str) -> None:
        table = self._table = events[word]
        chosen = np.array([name.startswith(beginnings) for name in events.names] + [False])
        rows = np.flatnonzero(chosen[table.name])
        rows = rows[np.argsort(table.start[rows], kind="stable")]
        threads = table.thread[rows]
        self._rows = {int(thread): rows[threads == thread] for thread in np.unique(threads)}
        self._starts = {thread: table.start[mine] for thread, mine in self._rows.items()}

    def row(self, thread: int, time: int) -> int:
        """Return the row of the event around this time; -1 if there is none."""
        if thread not in self._rows:
            return -1
        at = int(np.searchsorted(self._starts[thread], time, side="right")) - 1
        row = int(self._rows[thread][at])
        return row if at >= 0 and self._table.end[row] >= time else -1

    def args(self, thread: int, time: int) -> dict[str, Any]:
        """Return the arguments of the event around this time; none if there is none."""
        return self._table.args.get(self.row(thread, time), {})


# ---- operators and annotations


def _of_operators(events: Events, about: RankIdentity) -> Iterator[Comm]:
    """Yield what c10d's operators issue: the n-th of a kind is the n-th that the backend's annotations carry out."""
    ops, said = events["op"], events["annotation"]
    runs: dict[str, list[int]] = defaultdict(list)
    for row in np.argsort(said.start, kind="stable").tolist():
        name = events.names[said.name[row]]
        if name.startswith(BACKENDS):
            runs[_queue(kind_of(name))].append(row)
    issued: dict[str, list[int]] = defaultdict(list)
    reached: dict[int, int] = {}
    for row in np.lexsort((-ops.end, ops.start)).tolist():
        name = events.names[ops.name[row]]
        if name.startswith("c10d::") and kind_of(name.removeprefix("c10d::")) is not None:
            if ops.start[row] < reached.get(int(ops.thread[row]), -1):
                continue  # the same call, dispatched on to the backend's kernel
            reached[int(ops.thread[row])] = int(ops.end[row])
            issued[_queue(kind_of(name.removeprefix("c10d::")))].append(row)
    for queue in {*runs, *issued}:
        pairs = len(runs[queue]) == len(issued[queue])
        if pairs or len(issued[queue]) > len(runs[queue]):
            for number, row in enumerate(issued[queue]):
                yield _of_operator(events, about, row, runs[queue][number] if pairs else -1)
        else:  # the file begins after some were issued, or was sampled
            for row in runs[queue]:
                yield _of_annotation(events, about, row)


def _queue(kind: Kind | None) -> str:
    """Return which of a backend's queues a kind goes to; gloo reduces and scatters by an all-reduce."""
    return kind.word if kind in (Kind.SEND, Kind.RECV) else "collectives"


def _of_operator(events: Events, about: RankIdentity, row: int, run: int) -> Comm:
    ops, said = events["op"], events["annotation"]
    name = events.names[ops.name[row]].removeprefix("c10d::")
    args = ops.args.get(row, {})
    _, _, dtype = payload_of_shapes(said.args.get(run, {}))
    nbytes, elements, dtype = payload_of_shapes(args, dtype)
    kind, peer = kind_of(name), -1
    if kind in (Kind.SEND, Kind.RECV):
        numbers = (whole_of(text) for text in args.get("Concrete Inputs", ()))
        peer = next((number for number in numbers if number is not None), -1)
    start, end = int(ops.start[row]), int(ops.end[row])
    if run >= 0:
        start, end = max(start, int(said.start[run])), max(end, int(said.end[run]))
    call = CollectiveCall(kind, nbytes, about.world, peer, dtype, elements)
    return Comm(call, start, max(start, end), int(ops.start[row]), name)


def _of_annotation(events: Events, about: RankIdentity, row: int) -> Comm:
    said = events["annotation"]
    name = events.names[said.name[row]]
    nbytes, elements, dtype = payload_of_shapes(said.args.get(row, {}))
    kind, ends = kind_of(name), ends_of(name)
    peer = -1 if ends is None else ends[1] if kind == Kind.SEND else ends[0]
    start, end = int(said.start[row]), int(said.end[row])
    return Comm(CollectiveCall(kind, nbytes, about.world, peer, dtype, elements), start, end, start, name)

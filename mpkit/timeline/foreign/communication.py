"""The communications of one rank, from whatever its file has of them.

    kernels        of NCCL on a GPU, with the metadata that torch writes to them since 2.2; of another library their
                   name tells what they do
    operators      of c10d on a CPU: issued by the operator, carried out where the backend's annotation is (`gloo:...`);
                   the payload follows from the shapes of the inputs

Payloads count as in the kit's own traces, which is as NCCL's documentation counts them: the whole tensor that is
gathered or scattered.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from mpkit.timeline.foreign.kineto import TABLE, Events
from mpkit.trace import Kind

BACKENDS = ("gloo:", "nccl:", "rccl:", "ucc:", "xccl:", "mpi:")
MESSAGES = (Kind.SEND, Kind.RECV)
_KINDS = {word: Kind[kind] for word, kind in TABLE["collectives"].items()}
_BYTES = {dtype: int(size) for size, dtypes in TABLE["bytes"].items() for dtype in dtypes}
_ONE_BYTE = re.compile(r"byte|char|bool|u?int8|signed char|unsigned char|(c10::)?float8")
_WHOLE = re.compile(r"[0-9]{1,15}")


class Comm(NamedTuple):
    """One communication of one rank; "", 0 and () are for what is unknown."""

    kind: Kind
    start: int  # ns, when it was under way
    end: int
    asked: int  # ns, when the program issued it
    name: str  # in the file
    nbytes: int = 0  # its payload
    members: tuple[int, ...] = ()  # the ranks of its group, ascending
    peer: int = -1  # the other end of a message or the root, as a rank of the group; -1: none or unknown
    dtype: str = ""  # of the payload
    elements: int = 0
    sequence: int = -1  # the number that the backend gave it; -1: unknown
    axis: str = ""  # the mesh axis that the group was made for
    parts: tuple[int, ...] = ()  # of an all-to-all of uneven parts, the bytes for each of the members


def communications(events: Events) -> list[Comm]:
    """Return a rank's communications by start."""
    found = _of_kernels(events) if events.on_device else _of_operators(events)
    return sorted(found, key=lambda comm: (comm.start, comm.end))


# ---- what a file tells of a communication


def kind_of(name: str) -> Kind | None:
    """Return the kind of a collective or a kernel by its name; None if the name tells none.

    >>> kind_of("_allgather_base"), kind_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)")
    (<Kind.ALL_GATHER: 35>, <Kind.REDUCE_SCATTER: 36>)
    >>> kind_of("wait"), kind_of("ncclDevKernel_Generic")
    (None, None)
    """
    word = name.lower().replace("_", "")
    return next((kind for known, kind in _KINDS.items() if known in word), None)


def comm_fields(
    kind: Kind, args: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]], axes: Mapping[str, str]
) -> dict[str, Any]:
    """Return the fields of `Comm` that a kernel's arguments (`EventTable.args`) tell.

    `groups` and `axes` have the ranks and the mesh axis of each process group of `distributedInfo`, by its name.

    >>> args = {"dtype": "Float", "In msg nelems": 4, "Process Group Ranks": "[0, 1]"}
    >>> said = comm_fields(Kind.ALL_REDUCE, args, {}, {})
    >>> said["nbytes"], said["members"]
    (16, (0, 1))
    """
    sent = max(args.get("In msg nelems", 0), 0)
    elements = max(sent, args.get("Out msg nelems", 0))
    dtype, members = args.get("dtype", ""), _members_of(args, groups)
    splits = _listed(args.get("In split size", "")) if kind == Kind.ALL_TO_ALL else ()
    splits = splits if len(splits) == len(members) and sum(splits) > 0 else ()
    elements = sent if splits else elements  # of uneven parts, the payload is what this rank sends
    said = args.get("Process Group Description", "")
    axis = axes.get(args.get("Process Group Name", ""), "")
    return {
        "nbytes": elements * _size(dtype),
        "members": members,
        "peer": args.get("Dst Rank" if kind == Kind.SEND else "Src Rank", -1) if kind in MESSAGES else -1,
        "dtype": dtype.lower(),
        "elements": elements,
        "sequence": args.get("Seq", -1),
        "axis": said.removeprefix("mesh_") if said.startswith("mesh_") else axis,
        "parts": tuple(elements * _size(dtype) * rows // sum(splits) for rows in splits),
    }


def _listed(text: str) -> tuple[int, ...]:
    """Return the numbers of a list that is written in full; none of one that is cut short.

    >>> _listed("[3, 0, 5]"), _listed("[3, 0, ..., 5]")
    ((3, 0, 5), ())
    """
    whole = re.fullmatch(r"\[[0-9]{1,15}(?:, *[0-9]{1,15})*\]", text)
    return tuple(map(int, re.findall("[0-9]+", text))) if whole else ()


def _members_of(args: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks of a communication's group: as listed, as the file's header has them, or as counted.

    >>> _members_of({"Process Group Ranks": "[0, 4, ...]", "Global rank start": 0, "Global rank stride": 4,
    ...              "Group size": 3}, {})
    (0, 4, 8)
    """
    text, size = args.get("Process Group Ranks", ""), args.get("Group size", 0)
    ranks = tuple(sorted(map(int, re.findall(r"(?<!\d)[0-9]{1,6}(?!\d)", text))))
    if ranks and "..." not in text and len(ranks) >= size:
        return ranks
    if known := groups.get(args.get("Process Group Name", ""), ()):
        return known
    first, stride = args.get("Global rank start", -1), args.get("Global rank stride", 0)
    return tuple(range(first, first + size * stride, stride)) if size > 0 < stride and first >= 0 else ranks


def _payload(args: Mapping[str, Any], dtype: str = "") -> tuple[int, int, str]:
    """Return bytes, elements and dtype of the largest tensor (or list of tensors) among an operator's inputs."""
    dtype = dtype or next((each for each in args.get("types", ()) if _size(each)), "")
    elements = args.get("elements", 0)
    return elements * _size(dtype), elements, dtype.removeprefix("c10::").lower()


def _size(dtype: str) -> int:
    word = dtype.lower()
    return _BYTES.get(word, 1 if _ONE_BYTE.match(word) else 0)


# ---- kernels


def _of_kernels(events: Events) -> Iterator[Comm]:
    kernel, about, asked = events["kernel"], events.about, events.asked("kernel")
    for row in np.flatnonzero(events.communicates).tolist():
        name, metadata = events.names[kernel.name[row]], kernel.args.get(row, {})
        collective = metadata.get("Collective name", "")
        kind = kind_of(collective or name)
        if kind is None:
            if not collective:  # else it is a wait, or something else that moves nothing
                events.assumed["communication of unknown kind, left out"] += 1
            continue
        said = comm_fields(kind, metadata, about.groups, about.axes)
        if not collective:
            said["members"] = said["members"] or about.world
        if not metadata and len(about.world) > 2:
            events.assumed["communication that names no group, taken for one among all ranks"] += 1
        if len(said["members"]) != 1 or metadata:
            times = int(kernel.start[row]), int(kernel.end[row]), int(asked[row])
            yield Comm(kind, *times, collective or name, **said)


# ---- operators and annotations


def _of_operators(events: Events) -> Iterator[Comm]:
    """Yield what c10d's operators issue: the n-th of a kind is the n-th that the backend's annotations carry out."""
    ops, said = events["op"], events["annotation"]
    runs: dict[str, list[int]] = defaultdict(list)
    for row in np.argsort(said.start, kind="stable").tolist():
        name = events.names[said.name[row]]
        if name.startswith(BACKENDS) and (kind := kind_of(name)) is not None:
            runs[_queue(kind)].append(row)
    issued: dict[str, list[int]] = defaultdict(list)
    reached: dict[int, int] = {}
    for row in np.lexsort((-ops.end, ops.start)).tolist():
        name = events.names[ops.name[row]]
        if name.startswith("c10d::") and (kind := kind_of(name.removeprefix("c10d::"))) is not None:
            thread = int(ops.thread[row])
            if ops.start[row] < reached.get(thread, -1):
                continue  # the same call, dispatched on to the backend's kernel
            reached[thread] = int(ops.end[row])
            issued[_queue(kind)].append(row)
    for queue in {*runs, *issued}:
        done, asked = runs[queue], issued[queue]
        # The file begins after some were issued, or was sampled: the longer list counts.
        if len(done) != len(asked):
            done, asked = (done, []) if len(done) > len(asked) else ([], asked)
        for row, run in zip_longest(asked, done, fillvalue=-1):
            yield _of_operator(events, row, run)


def _queue(kind: Kind) -> str:
    """Return the backend's queue for a kind; gloo reduces and scatters by an all-reduce."""
    return kind.word if kind in MESSAGES else "collectives"


def _of_operator(events: Events, row: int, run: int) -> Comm:
    """Return the communication that an operator issues and an annotation carries out; a row of -1 is unknown."""
    ops, said = events["op"], events["annotation"]
    carried, peer = _payload(said.args.get(run, {})), -1
    if row < 0:
        name, start, end = events.names[said.name[run]], int(said.start[run]), int(said.end[run])
        kind, asked, payload = kind_of(name), start, carried
    else:
        name = events.names[ops.name[row]].removeprefix("c10d::")
        args, kind, asked, end = ops.args.get(row, {}), kind_of(name), int(ops.start[row]), int(ops.end[row])
        start, payload = asked, _payload(args, carried[2])
        if kind in MESSAGES:
            peer = next((int(text) for text in args.get("inputs", ()) if _WHOLE.fullmatch(text)), -1)
        if run >= 0:
            start, end = max(start, int(said.start[run])), max(end, int(said.end[run]))
    assert kind is not None
    nbytes, elements, dtype = payload
    return Comm(kind, start, max(start, end), asked, name, nbytes, events.about.world, peer, dtype, elements)

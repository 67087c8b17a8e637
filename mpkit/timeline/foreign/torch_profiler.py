"""Files of torch.profiler, one per rank, become one Trace.

read        each file's events, and what it says of its rank
ranks       their order and numbers; ranks without a file stay absent
clocks      hosts' clocks put on one
records     each rank's ops
facts       in `meta["imported"]`: files, ranks, clocks, what bounds kernels
notes       what a reader should know, in sentences: what is absent, unknown, fixed or assumed

A collective ends on all of its ranks at the same moment, which aligns clocks: for each pair of ranks the offset is the
median, over the collectives that they share, of the difference of the ends. It minimizes the sum of absolute residuals,
so that a few late ends do not move it. Ranks that share no collective with the first one are reached over others; ranks
of one host share a clock. If what is left is not small beside the time between collectives, the n-th of one file is not
the n-th of the other (sampled files, or other windows): such clocks stay as they are. HolisticTraceAnalysis and
Scalasca synchronize time stamps the same way.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpkit.common.units import seconds
from mpkit.devices.catalogue import hardware
from mpkit.errors import TraceError
from mpkit.timeline.foreign.actions import cut_steps, profiled_steps
from mpkit.timeline.foreign.announced_plan import count_announcements
from mpkit.timeline.foreign.communication import Comm, communications
from mpkit.timeline.foreign.kineto import TABLE, Events
from mpkit.timeline.foreign.rank import group_of, rank_trace
from mpkit.trace import Kind, Trace

Ends = dict[tuple[tuple[tuple[int, ...], int], int], int]
"""When each collective ended on a rank, by its members and kind, and its number."""


class ClockAlignment(NamedTuple):
    """How one rank's clock was put on the first one's."""

    offset: int = 0  # ns that are added to its times
    residual: int = 0  # ns: the median of what is left of the differences of ends
    shared: int = 0  # the collectives whose ends were compared; 0 if the clock is used as it is


def align(parts: Sequence[Events], comms: Sequence[Sequence[Comm]]) -> list[ClockAlignment]:
    """Return each rank's clock; a rank of unknown host has a clock of its own."""
    ends = [_ends(mine, events.origin) for mine, events in zip(comms, parts, strict=True)]
    clocks: dict[int, ClockAlignment] = {}
    reached: list[int] = []
    while len(clocks) < len(ends):
        if not reached:
            reached.append(next(rank for rank in range(len(ends)) if rank not in clocks))
            clocks[reached[0]] = ClockAlignment()
        one = reached.pop(0)
        for other in set(range(len(ends))) - set(clocks):
            if parts[one].host and parts[one].host == parts[other].host:
                clocks[other] = clocks[one]
            elif (found := _offset(ends[one], ends[other])).shared:
                clocks[other] = found._replace(offset=found.offset + clocks[one].offset)
            else:
                continue
            reached.append(other)
    return [clocks[rank] for rank in range(len(ends))]


def _ends(comms: Sequence[Comm], origin: int) -> Ends:
    counted: Counter[tuple[tuple[int, ...], int]] = Counter()
    ends: Ends = {}
    for comm in comms:
        if comm.kind not in (Kind.SEND, Kind.RECV) and len(comm.members) > 1:
            key = comm.members, int(comm.kind)
            number = comm.sequence if comm.sequence >= 0 else counted[key]
            ends[key, number] = comm.end + origin
            counted[key] += 1
    return ends


def _offset(one: Ends, other: Ends) -> ClockAlignment:
    """Return the clock of `other` as seen by `one`; unshifted if they do not share the same collectives."""
    counts = [Counter(key for key, _ in ends) for ends in (one, other)]
    shared = one.keys() & other.keys()
    whole = [one[each] - other[each] for each in shared if counts[0][each[0]] == counts[1][each[0]]]
    if not whole:
        return ClockAlignment()
    offset = int(np.median(whole))
    residual = int(np.median(np.abs(np.array(whole) - offset)))
    between = np.median(np.diff(sorted(one.values()))) if len(one) > 1 else np.inf
    return ClockAlignment(offset, residual, len(whole)) if residual < between / 4 else ClockAlignment()


def machine_of(device: str) -> str:
    """Return the name of a machine with this GPU; the GPU's own name if the catalogue has none, "cpu" without one.

    >>> machine_of("NVIDIA H100 80GB HBM3"), machine_of("NVIDIA A100-PG509-200"), machine_of("")
    ('8x-h100-nvlink', '8x-a100-40-nvlink', 'cpu')
    """
    known = next((machine for words, machine in TABLE["gpus"].items() if words in device), device or "cpu")
    return known if known in hardware() else device


def import_traces(paths: Sequence[Path]) -> Trace:
    """Return the Trace of these files."""
    parts = [Events(path) for path in paths]
    _refuse_others(parts)
    parts = _in_order(parts)
    numbers = _ranks_of(parts)
    index = {rank: at for at, rank in enumerate(numbers)}
    comms = [communications(events) for events in parts]
    clocks = align(parts, comms)
    origins = [events.origin + clock.offset for events, clock in zip(parts, clocks, strict=True)]
    written = [
        rank_trace(events, comms[at], index, at, origins[at] - min(origins) + 1)
        for at, events in enumerate(parts)
    ]
    ranks = [rank for rank, _ in written]
    abouts, on_device = [events.about for events in parts], any(events.on_device for events in parts)
    device = next((each.about.device for each in parts if each.on_device and each.about.device), "")
    imported: dict[str, Any] = {
        "files": [about.source for about in abouts],
        "ranks": [numbers[at] if about.rank is not None else None for at, about in enumerate(abouts)],
        "world_size": max((about.world_size or 0 for about in abouts), default=0) or None,
        "gpu": device,
        "clocks": [clock._asdict() for clock in clocks],
        "groups": [_groups(mine, index, at) for at, mine in enumerate(comms)],
        "said": [count_announcements(events) for events in parts],
        "bounds": [bounds for _, bounds in written],
    }
    imported["notes"] = list(notes_on(parts, imported, clocks, comms))
    meta = {
        "world_size": len(parts),
        "device": "cuda" if on_device else "cpu",
        "axes": {
            group: comm.axis
            for at, mine in enumerate(comms)
            for comm in mine
            if comm.axis and "," in (group := group_of(comm, index, at))
        },
        "imported": imported,
        "hardware": machine_of(device or "a GPU") if on_device else "cpu",
        "first_step": min((int(step) for rank in ranks for step in rank.ops["step"] if step >= 0), default=0),
    }
    return Trace(ranks, meta).check()


def _refuse_others(parts: Sequence[Events]) -> None:
    """Raise a TraceError for files without any event of torch.profiler's."""
    if any(events.is_kineto for events in parts):
        return
    there = ", ".join(sorted({category for events in parts for category in events.unknown}))
    raise TraceError(
        f"{', '.join(events.about.source for events in parts)}: there are no events of the categories of "
        f"torch.profiler's that take time{f', but {there}' if there else ''}. mk.open takes what torch.profiler's "
        "export_chrome_trace writes; ui.perfetto.dev shows traces of other tools"
    )


def _in_order(parts: list[Events]) -> list[Events]:
    """Return the files by rank, those of unknown rank last; a TraceError if two are of the same rank."""
    counted = Counter(events.about.rank for events in parts if events.about.rank is not None)
    rank, many = max(counted.items(), key=lambda item: item[1], default=(0, 0))
    if many > 1:
        files = ", ".join(events.about.source for events in parts if events.about.rank == rank)
        raise TraceError(
            f"{files} are all of rank {rank}, and a Trace has one file per rank: give mk.open the files of one "
            "profiled window, one of each rank"
        )
    return sorted(parts, key=lambda e: (e.about.rank is None, e.about.rank or 0, e.about.source))


def _ranks_of(parts: Sequence[Events]) -> list[int]:
    """Return each file's rank; files of unknown rank take the numbers that are left."""
    known = [events.about.rank for events in parts]
    left = (
        number for number in range(2 * len(known) + max(rank or 0 for rank in known)) if number not in known
    )
    return [next(left) if rank is None else rank for rank in known]


def _groups(comms: Sequence[Comm], index: Mapping[int, int], mine: int) -> dict[str, list[Any]]:
    """Return the size (with absent ranks) and the axis of each group of a rank, by kind and group."""
    counted: dict[str, Counter[tuple[int, str]]] = {}
    for comm in comms:
        key = f"{comm.kind.word} {group_of(comm, index, mine)}"
        whole = max(len(comm.members), 1), comm.axis
        counted.setdefault(key, Counter())[whole] += comm.nbytes + 1
    return {key: list(groups.most_common(1)[0][0]) for key, groups in counted.items()}


# ---- notes


def notes_on(
    parts: Sequence[Events],
    imported: dict[str, Any],
    clocks: Sequence[ClockAlignment],
    comms: Sequence[Sequence[Comm]],
) -> Iterator[str]:
    """Yield sentences on what a reader of an imported trace should know."""
    ranks, world = ["?" if rank is None else str(rank) for rank in imported["ranks"]], imported["world_size"]
    if unknown := [events.about.source for events in parts if events.about.rank is None]:
        more = f" and {len(unknown) - 3} more files" if len(unknown) > 3 else ""
        files = f"{', '.join(unknown[:3])}{more}"
        yield f"The rank of {files} is not in the file: numbers are in order of the files."
    if world and len(parts) < world:
        yield (
            f"{len(parts)} of {world} ranks: rank{'s' * (len(parts) > 1)} {_listed(ranks)}. What the others do is not "
            "known, and on other hardware a communication takes the time that it takes among the ranks that are here."
        )
    for events in parts:
        yield from events.notes()
        if events.unknown:
            listed = ", ".join(f"{name} ({n:,} events)" for name, n in events.unknown.most_common())
            yield f"{events.about.source} has events of categories that are not known, and not shown: {listed}."
        if events.on_device and len(events.memory) and not (events.memory[:, 2] > 0).any():
            yield (
                f"{events.about.source}: its memory events are of the host only, so the GPU's memory is not known. "
                "profile(profile_memory=True) before the model is on the GPU records it."
            )
    yield from _cut_off(parts, ranks)
    moved = [clock for clock in clocks if clock.shared]
    if moved:
        yield (
            f"The clocks of {len(moved)} rank{'s' * (len(moved) > 1)} were put on that of rank {ranks[0]} by the ends "
            f"of {sum(clock.shared for clock in moved):,} shared collectives, to within "
            f"{seconds(max(clock.residual for clock in moved) * 1e-9)} (the median of what is left)."
        )
    hosts = {events.host for events in parts}
    if len(parts) > 1 and not moved and (len(hosts) > 1 or "" in hosts):
        yield (
            "The clocks of these ranks are used as they are: their files do not have the same collectives, by whose "
            "ends they could be aligned."
        )
    sizes = [comm.nbytes for mine in comms for comm in mine if comm.kind != Kind.BARRIER]
    if unsaid := sizes.count(0):
        yield (
            f"The payloads of {unsaid:,} of {len(sizes):,} communications are unknown: they count as no bytes, and on "
            "other hardware take latency alone. profile(record_shapes=True) records them on CPUs, torch 2.2 and "
            "later on GPUs."
        )


def _listed(ranks: Sequence[str]) -> str:
    return ", ".join(ranks[:8]) + ", ..." * (len(ranks) > 8)


def _cut_off(parts: Sequence[Events], ranks: Sequence[str]) -> Iterator[str]:
    """Yield what to say of steps within which recording ended."""
    cut: dict[tuple[int, str], list[str]] = {}
    for events, rank in zip(parts, ranks, strict=True):
        steps, said = profiled_steps(events), events["annotation"]
        for row in cut_steps(events):
            took = seconds(float(said.end[row] - said.start[row]) * 1e-9)
            cut.setdefault((steps[row], took), []).append(rank)
    for (number, took), whose in cut.items():
        yield (
            f"Step {number} of rank {_listed(whose)} was cut off after {took}, when recording ended: it does not "
            "count as a step."
        )

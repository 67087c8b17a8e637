"""Files of torch.profiler, one per rank, become one Trace.

read        each file's events, and what it says of its rank
ranks       their order and numbers; ranks without a file stay absent
clocks      hosts' clocks put on one
records     each rank's ops
facts       in `meta["imported"]`: files, ranks, repairs, how busy GPUs are; and sentences for the reader
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpkit.devices.catalogue import hardware
from mpkit.errors import TraceError
from mpkit.timeline.foreign.announced_plan import said_by
from mpkit.timeline.foreign.chrome import plain_trace
from mpkit.timeline.foreign.clocks import ClockAlignment, align
from mpkit.timeline.foreign.communication import Comm, communications
from mpkit.timeline.foreign.kineto import TABLE, Events, read_events
from mpkit.timeline.foreign.notes import host_of, host_or_unknown, notes_on, without_layers
from mpkit.timeline.foreign.rank import group_of, rank_trace
from mpkit.timeline.foreign.rank_identity import RankIdentity, read_header
from mpkit.trace import Trace

__all__ = ["import_traces", "machine_of"]


def machine_of(device: str) -> str:
    """Return the name of a machine with this GPU; the GPU's own name if the catalogue has none, "cpu" without one.

    >>> machine_of("NVIDIA H100 80GB HBM3"), machine_of("NVIDIA A100-PG509-200"), machine_of("")
    ('8x-h100-nvlink', '8x-a100-40-nvlink', 'cpu')
    """
    known = next((machine for words, machine in TABLE["gpus"].items() if words in device), device or "cpu")
    return known if known in hardware() else device


def import_traces(
    paths: Sequence[Path], progress: Callable[[Path, int], None] = lambda path, done: None
) -> Trace:
    """Return the Trace of these files.

    Args:
        paths: JSON in Chrome's format, one file per rank.
        progress: is called with a file and the bytes of it that have been read.

    Raises:
        TraceError: a file is no JSON, or two files are of the same rank.
    """
    parts: list[tuple[RankIdentity, Events]] = []
    for path in paths:
        events = read_events(path, lambda done, path=path: progress(path, done))  # type: ignore[misc]
        parts.append((read_header(events.header, path, _gpu_of(events)), events))
    if not any(events.is_kineto for _, events in parts):
        return plain_trace([(about.source, events) for about, events in parts])
    parts = _in_order(parts)
    numbers = _ranks_of([about for about, _ in parts])
    index = {rank: at for at, rank in enumerate(numbers)}
    comms = [communications(events, who) for who, events in parts]
    clocks = align(comms, [events.origin for _, events in parts], [host_of(events) for _, events in parts])
    origins = [events.origin + clock.offset for (_, events), clock in zip(parts, clocks, strict=True)]
    written = [
        rank_trace(events, comms[at], index, at, origins[at] - min(origins) + 1)
        for at, (_, events) in enumerate(parts)
    ]
    ranks = [rank for rank, _ in written]
    meta = _meta(parts, numbers, comms, clocks)
    steps = {int(step) for rank in ranks for step in rank.ops["step"] if step >= 0}
    meta["imported"]["bounds"] = [bounds for _, bounds in written]
    meta["first_step"] = min(steps, default=0)
    meta["imported"]["notes"] += without_layers(ranks, numbers)
    return Trace(ranks, meta).check()


# ---- ranks


def _in_order(parts: list[tuple[RankIdentity, Events]]) -> list[tuple[RankIdentity, Events]]:
    """Return the files by rank, those of unknown rank last.

    Raises:
        TraceError: two files are of the same rank.
    """
    counted = Counter(who.rank for who, _ in parts if who.rank is not None)
    rank, many = max(counted.items(), key=lambda item: item[1], default=(0, 0))
    if many > 1:
        files = ", ".join(who.source for who, _ in parts if who.rank == rank)
        raise TraceError(
            f"{files} are all of rank {rank}, and a Trace has one file per rank: give mk.open the files of one "
            "profiled window, one of each rank"
        )
    return sorted(parts, key=lambda part: (part[0].rank is None, part[0].rank or 0, part[0].source))


def _ranks_of(known: Sequence[RankIdentity]) -> list[int]:
    """Return each file's rank; files of unknown rank take the numbers that are left."""
    taken = {who.rank for who in known}
    left = (number for number in range(2 * len(known) + max((r or 0) for r in taken)) if number not in taken)
    return [who.rank if who.rank is not None else next(left) for who in known]


def _gpu_of(events: Events) -> str:
    """Return the number of the GPU that most kernels ran on."""
    counted = Counter(events.threads[stream][0] for stream in events["kernel"].thread.tolist())
    return counted.most_common(1)[0][0] if counted else "0"


# ---- facts


def _meta(
    parts: Sequence[tuple[RankIdentity, Events]], numbers: Sequence[int], comms: Sequence[Sequence[Comm]],
    clocks: Sequence[ClockAlignment],
) -> dict[str, Any]:  # fmt: skip
    first, on_device = parts[0][0], any(events.on_device for _, events in parts)
    device = next((who.device for who, events in parts if events.on_device and who.device), "")
    world = max((who.world_size or 0 for who, _ in parts), default=0)
    index = {rank: at for at, rank in enumerate(numbers)}
    axes = {
        group: comm.call.axis
        for at, mine in enumerate(comms)
        for comm in mine
        if comm.call.axis and "," in (group := group_of(comm, index, at))
    }
    imported = {
        "files": [who.source for who, _ in parts],
        "ranks": [numbers[at] if who.rank is not None else None for at, (who, _) in enumerate(parts)],
        "world_size": world or None,
        "backend": first.backend,
        "gpu": device,
        "repairs": [events.repairs for _, events in parts],
        "clocks": [asdict(clock) for clock in clocks],
        "groups": [_groups(mine, index, at) for at, mine in enumerate(comms)],
        "said": [said_by(events) for _, events in parts],
        "reserved": [int(events.memory[:, 4].max(initial=-1)) for _, events in parts],
    }
    imported["notes"] = notes_on(parts, imported, clocks, comms)
    return {
        "world_size": len(parts), "device": "cuda" if on_device else "cpu", "axes": axes, "imported": imported,
        "hardware": machine_of(device or "a GPU") if on_device else host_or_unknown([events for _, events in parts]),
    }  # fmt: skip


def _groups(comms: Sequence[Comm], index: Mapping[int, int], mine: int) -> dict[str, list[Any]]:
    """Return how many ranks a rank's groups really have, absent ones too, and their axis, by kind and group."""
    counted: dict[str, Counter[tuple[int, str]]] = {}
    for comm in comms:
        key = f"{comm.kind.word} {group_of(comm, index, mine)}"
        whole = max(len(comm.call.members), 1), comm.call.axis
        counted.setdefault(key, Counter())[whole] += comm.call.nbytes + 1
    return {key: list(groups.most_common(1)[0][0]) for key, groups in counted.items()}

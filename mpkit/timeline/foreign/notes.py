"""What a reader of an imported trace should know, in sentences: what is absent, unknown, fixed or assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.units import percent, seconds
from mpkit.timeline.foreign.clocks import ClockAlignment
from mpkit.timeline.foreign.communication import Comm
from mpkit.timeline.foreign.kineto import TABLE, Events, text_of
from mpkit.timeline.foreign.phases import cut_steps, profiled_steps
from mpkit.timeline.foreign.rank import MOST
from mpkit.timeline.foreign.rank_identity import RankIdentity
from mpkit.timeline.metrics import covered, length
from mpkit.trace import Kind, RankTrace

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline

__all__ = ["host_notes", "host_of", "host_or_unknown", "notes_on", "without_layers"]


def host_of(events: Events) -> str:
    """Return the name of a rank's host; "" if unknown."""
    return text_of(events.header.get("host_name"))


def notes_on(
    parts: Sequence[tuple[RankIdentity, Events]],
    imported: dict[str, Any],
    clocks: Sequence[ClockAlignment],
    comms: Sequence[Sequence[Comm]],
) -> list[str]:
    """Return sentences on what a reader of an imported trace should know."""
    notes = []
    ranks, world = imported["ranks"], imported["world_size"]
    many = "s" * (len(parts) > 1)
    if None in ranks:
        notes.append(f"The rank of {_unknown(parts)} is not in the file: numbers are in order of the files.")
    if world and len(parts) < world:
        there = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
        notes.append(
            f"{len(parts)} of {world} ranks: rank{many} {there}. What the others do is not known, and on other "
            "hardware a communication takes the time that it takes among the ranks that are here."
        )
    notes += [note for who, events in parts for note in events.notes(who.source)]
    notes += [note for who, events in parts for note in _unknown_categories(who.source, events)]
    notes += [note for who, events in parts for note in _doubtful(who.source, events)]
    notes += _cut_off(parts, ranks)
    moved = [clock for clock in clocks if clock.shared]
    if moved:
        worst = max(clock.residual for clock in moved) * 1e-9
        notes.append(
            f"The clocks of {len(moved)} rank{'s' * (len(moved) > 1)} were put on that of rank {ranks[0]} by the ends "
            f"of {sum(clock.shared for clock in moved):,} shared collectives, to within {seconds(worst)} (the median "
            "of what is left)."
        )
    hosts = {host_of(events) for _, events in parts}
    if len(parts) > 1 and not moved and (len(hosts) > 1 or "" in hosts):
        notes.append(
            "The clocks of these ranks are used as they are: their files do not have the same collectives, by whose "
            "ends they could be aligned."
        )
    return notes + _unknown_payloads(comms)


APART = 0.02
"""How far two bubbles of one trace may be apart without a word."""


def host_notes(recorded: Timeline, replayed: Timeline) -> list[str]:
    """Return a sentence on why a replayed bubble is smaller than the recorded one: the host's delays count as work."""
    if not recorded.steps or recorded.bubble - replayed.bubble < APART:
        return []
    return [
        f"As recorded, the bubble is {percent(recorded.bubble)}, and here {percent(replayed.bubble)}: the time between "
        "the kernels of a forward or backward, in which the host launches nothing, counts as work in a replay, since "
        "another device does not change it. Compare step times, and not bubbles."
    ]


OVERLAP = 10_000
"""ns by which kernels of one stream may overlap without a word: clocks have grains, and short kernels launch early."""

UNKNOWN = "a device whose events are of unknown categories"
"""The hardware of a trace without a GPU, but with enough events that may be a device's."""


def host_or_unknown(ranks: Sequence[Events]) -> str:
    """Return the hardware of ranks without a GPU."""
    shares = [share for events in ranks for _, share in _shares(events).values()]
    return "cpu" if max(shares, default=0.0) < 0.05 else UNKNOWN


def _shares(events: Events) -> dict[str, tuple[int, float]]:
    """Return, for each category that is not known, its events and the share of the trace's time that they cover."""
    other, tables = events["other"], [table for table in events.tables.values() if len(table)]
    whole = (
        max(table.end.max() for table in tables) - min(table.start.min() for table in tables) if tables else 0
    )
    found = {}
    for category in {each for each in events.categories if each.lower() not in TABLE["ignored"]}:
        rows = np.flatnonzero(np.array(events.categories) == category)
        busy = length(covered(other.start[rows], other.end[rows]))
        found[category or "none"] = len(rows), busy / whole if whole else 0.0
    return found


def _unknown_categories(source: str, events: Events) -> list[str]:
    listed = ", ".join(
        f"{category} ({count:,} events, {percent(share)} of the time)"
        for category, (count, share) in sorted(_shares(events).items(), key=lambda each: -each[1][1])
    )
    return (
        [f"{source} has events of categories that are not known, and not shown: {listed}."] if listed else []
    )


def _doubtful(source: str, events: Events) -> list[str]:
    """Return what to say of a GPU's events that contradict each other, or that are of its host only."""
    notes = []
    kernel, device = events["kernel"], events.memory[:, 2]
    order = np.lexsort((kernel.start, kernel.thread))
    start, end, stream = kernel.start[order], kernel.end[order], kernel.thread[order]
    over = np.where(stream[1:] == stream[:-1], end[:-1] - start[1:], 0)
    late = over > OVERLAP
    if late.any():
        notes.append(
            f"{source}: {int(late.sum()):,} kernels end after the next kernel of their stream has begun, by "
            f"{seconds(float(over.max()) * 1e-9)} at most, and a stream runs one after the other: their durations are "
            "doubtful, and so is what depends on them (step times, idle shares)."
        )
    if events.on_device and len(device) and not (device > 0).any():
        notes.append(
            f"{source}: its memory events are of the host only, so the GPU's memory is not known. "
            "profile(profile_memory=True) before the model is on the GPU records it."
        )
    return notes


def _unknown_payloads(comms: Sequence[Sequence[Comm]]) -> list[str]:
    sizes = [comm.call.nbytes for mine in comms for comm in mine if comm.kind != Kind.BARRIER]
    unknown = sizes.count(0)
    if not unknown:
        return []
    return [
        f"The payloads of {unknown:,} of {len(sizes):,} communications are unknown: they count as no bytes, and on "
        "other hardware take latency alone. profile(record_shapes=True) records them on CPUs, torch 2.2 and "
        "later on GPUs."
    ]


def _cut_off(parts: Sequence[tuple[RankIdentity, Events]], ranks: Sequence[int | None]) -> list[str]:
    """Return what to say of steps within which recording ended."""
    cut: dict[tuple[int, str], list[int | None]] = {}
    for (_, events), rank in zip(parts, ranks, strict=True):
        steps, said = profiled_steps(events), events["annotation"]
        for row in cut_steps(events):
            took = seconds(float(said.end[row] - said.start[row]) * 1e-9)
            cut.setdefault((steps[row], took), []).append(rank)
    return [
        f"Step {number} of rank {', '.join('?' if rank is None else str(rank) for rank in whose[:8])} was cut off "
        f"after {took}, when recording ended: it does not count as a step."
        for (number, took), whose in cut.items()
    ]


def without_layers(ranks: Sequence[RankTrace], numbers: Sequence[int]) -> list[str]:
    """Return what to say of ranks that have more work than layers are shown of."""
    compute = [(rank.ops["kind"] < Kind.WAIT, rank.ops["depth"]) for rank in ranks]
    bare = [
        number
        for (works, depth), number in zip(compute, numbers, strict=True)
        if works.any() and not (works & (depth > 0)).any()
    ]
    if not bare:
        return []
    whose = ", ".join(map(str, bare[:8])) + (", ..." if len(bare) > 8 else "")
    return [
        f"Rank{'s' * (len(bare) > 1)} {whose}: layers within forwards and backwards are not shown, since there are "
        f"more than {MOST:,} pieces of work; a profile of fewer steps shows them."
    ]


def _unknown(parts: Sequence[tuple[RankIdentity, Events]]) -> str:
    files = [who.source for who, _ in parts if who.rank is None]
    return ", ".join(files[:3]) + (f" and {len(files) - 3} more files" if len(files) > 3 else "")

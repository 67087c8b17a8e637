"""What a reader of an imported trace should know, in sentences: what is absent, unknown, fixed or assumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.units import percent, seconds
from mpkit.timeline.foreign.clocks import ClockAlignment
from mpkit.timeline.foreign.communication import Comm
from mpkit.timeline.foreign.kineto import Events
from mpkit.timeline.foreign.phases import cut_steps, profiled_steps
from mpkit.timeline.foreign.rank import MOST
from mpkit.timeline.metrics import covered, length
from mpkit.trace import Kind, RankTrace

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline

__all__ = ["host_notes", "host_or_unknown", "notes_on"]

OVERLAP = 10_000
"""ns by which kernels of one stream may overlap without a word: clocks have grains, and short kernels launch early."""

UNKNOWN = "a device whose events are of unknown categories"
"""The hardware of a trace without a GPU, but with enough events that may be a device's."""

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


def notes_on(
    parts: Sequence[Events],
    imported: dict[str, Any],
    clocks: Sequence[ClockAlignment],
    comms: Sequence[Sequence[Comm]],
    written: Sequence[RankTrace],
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
        yield from _doubtful(events)
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
    sizes = [comm.call.nbytes for mine in comms for comm in mine if comm.kind != Kind.BARRIER]
    if unsaid := sizes.count(0):
        yield (
            f"The payloads of {unsaid:,} of {len(sizes):,} communications are unknown: they count as no bytes, and on "
            "other hardware take latency alone. profile(record_shapes=True) records them on CPUs, torch 2.2 and "
            "later on GPUs."
        )
    works = [(rank.ops["kind"] < Kind.WAIT, rank.ops["depth"] > 0) for rank in written]
    bare = [
        rank
        for (work, deep), rank in zip(works, ranks, strict=True)
        if work.any() and not (work & deep).any()
    ]
    if bare:
        yield (
            f"Rank{'s' * (len(bare) > 1)} {_listed(bare)}: layers within forwards and backwards are not shown, since "
            f"there are more than {MOST:,} pieces of work; a profile of fewer steps shows them."
        )


def _listed(ranks: Sequence[str]) -> str:
    return ", ".join(ranks[:8]) + ", ..." * (len(ranks) > 8)


def host_or_unknown(parts: Sequence[Events]) -> str:
    """Return the hardware of ranks without a GPU."""
    shares = [share for events in parts for _, share in _shares(events).values()]
    return "cpu" if max(shares, default=0.0) < 0.05 else UNKNOWN


def _shares(events: Events) -> dict[str, tuple[int, float]]:
    """Return, for each category that is not known, its events and the share of the trace's time that they cover."""
    return {
        category or "none": (len(each), length(covered(each[:, 0], each[:, 1])) / max(events.length, 1))
        for category, each in events.unknown.items()
    }


def _doubtful(events: Events) -> Iterator[str]:
    """Yield what to say of events of unknown categories, and of a GPU's that contradict each other."""
    source, kernel, device = events.about.source, events["kernel"], events.memory[:, 2]
    if events.unknown:
        by_share = sorted(_shares(events).items(), key=lambda each: -each[1][1])
        listed = ", ".join(
            f"{name} ({n:,} events, {percent(share)} of the time)" for name, (n, share) in by_share
        )
        yield f"{source} has events of categories that are not known, and not shown: {listed}."
    order = np.lexsort((kernel.start, kernel.thread))
    start, end, stream = kernel.start[order], kernel.end[order], kernel.thread[order]
    over = np.where(stream[1:] == stream[:-1], end[:-1] - start[1:], 0)
    if late := int((over > OVERLAP).sum()):
        yield (
            f"{source}: {late:,} kernels end after the next kernel of their stream has begun, by "
            f"{seconds(float(over.max()) * 1e-9)} at most, and a stream runs one after the other: their durations are "
            "doubtful, and so is what depends on them (step times, idle shares)."
        )
    if events.on_device and len(device) and not (device > 0).any():
        yield (
            f"{source}: its memory events are of the host only, so the GPU's memory is not known. "
            "profile(profile_memory=True) before the model is on the GPU records it."
        )


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

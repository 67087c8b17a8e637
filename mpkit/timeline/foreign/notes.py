"""What a reader of an imported trace should know, in sentences: what is absent, unknown, fixed or assumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpkit.common.units import seconds
from mpkit.timeline.foreign.clocks import ClockAlignment
from mpkit.timeline.foreign.communication import Comm
from mpkit.timeline.foreign.kineto import Events
from mpkit.timeline.foreign.phases import cut_steps, profiled_steps
from mpkit.trace import Kind

__all__ = ["notes_on"]


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

"""What a reader should know of the machine that a trace was replayed on: it is too small, or far apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.devices.hardware import Hardware
from mpkit.devices.unwise import across_nodes, out_of_memory

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline

__all__ = ["placement_notes"]


def placement_notes(timeline: Timeline, hardware: Hardware) -> list[str]:
    """Return a sentence for tensor parallelism across nodes, and one for the rank that its device cannot hold.

    Args:
        timeline: replayed on the machine.
        hardware: the machine.
    """
    notes = []
    mesh = timeline.mesh
    if mesh is not None and mesh.tp > 1 and (words := across_nodes(mesh.groups("tp"), hardware)):
        notes.append(words)
    peaks = [sum(held.values()) for held in timeline.peak_memory]
    excess = {rank: peak - hardware.device_of(rank).memory for rank, peak in enumerate(peaks)}
    known = {rank: over for rank, over in excess.items() if hardware.device_of(rank).memory and over > 0}
    if known:
        rank = max(known, key=known.__getitem__)
        held = timeline.peak_memory[rank]
        words = out_of_memory(peaks[rank], hardware.device_of(rank).memory, max(held, key=held.__getitem__))
        notes.append(f"Rank {rank} does not fit its {hardware.device_of(rank).name}: {words}.")
    return notes

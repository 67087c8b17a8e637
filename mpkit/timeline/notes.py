"""What a reader should know of a timeline: its proof, its clocks, its samples, the machine that it was replayed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpkit.common.units import seconds
from mpkit.devices.hardware import Hardware
from mpkit.devices.placement_notes import out_of_memory, spans_nodes
from mpkit.trace import Trace
from mpkit.trace.proof import Proof

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


REPEATED = (
    "Memory was measured in the first steps, until one repeated another; each later step of that kind is drawn as it "
    "was measured then."
)


def failure_notes(meta: Mapping[str, Any]) -> list[str]:
    """Return the error that the run ended with; none for a run that did not fail.

    >>> failure_notes({"failed": "RankFailed: rank 0 of 2 failed in step 2, stage 0: RuntimeError: boom"})
    ['The run failed: rank 0 of 2 failed in step 2, stage 0: RuntimeError: boom']
    """
    failed = str(meta.get("failed", ""))
    return [f"The run failed: {failed.removeprefix('RankFailed: ')}"] if failed else []


def proof_notes(meta: Mapping[str, Any]) -> list[str]:
    """Return the line of the run's proof; none for a trace without one.

    >>> proof_notes({"proof": {"steps": [1, 2], "loss": 0.0, "weights": 1e-16}})
    ['Equal to serial training in steps 1 and 2: loss to the bit, weights within 1e-16.']
    """
    proof = Proof.from_trace(meta.get("proof"))
    if proof is None or proof.why_not == "verify=False":
        return []
    line = str(proof)
    return [f"{line[:1].upper()}{line[1:]}."]


def clock_notes(meta: Mapping[str, Any]) -> list[str]:
    """Return a sentence on how the nodes' clocks were put on rank 0's; none for a run on one machine.

    >>> clock_notes({"clocks": [{"node": "1", "host": "b", "offset": -0.3, "residual": 5e-5, "drift": 0.0}]})
    ["The clock of b (0.3 s ahead) was put on rank 0's, to within 50.0 µs (half of a round trip through the store)."]
    """
    clocks = meta.get("clocks")
    if not isinstance(clocks, list) or not clocks:
        return []
    each, worst = [], 0.0
    for clock in clocks:
        offset, drift = float(clock["offset"]), float(clock["drift"])
        worst = max(worst, float(clock["residual"]))
        by = f"{abs(offset):.4g} s" if abs(offset) >= 0.1 else seconds(abs(offset))
        way = f"{by} {'ahead' if offset < 0 else 'behind'}"
        each.append(f"{clock['host']} ({way}{f', {seconds(drift)} of drift' if drift else ''})")
    whose, was = ("The clock of", "was") if len(each) == 1 else ("The clocks of", "were")
    names = ", ".join(each[:3]) + (f" and {len(each) - 3} more hosts" if len(each) > 3 else "")
    return [
        f"{whose} {names} {was} put on rank 0's, to within {seconds(worst)} (half of a round trip through the store)."
    ]


def sample_notes(trace: Trace, elsewhere: bool) -> list[str]:
    """Return sentences on samples of GPUs that a reader might expect, and on memory that is not measured anew.

    >>> sample_notes(Trace([], {"gpus_not_sampled": "GPUs were not sampled: ..."}), elsewhere=False)
    ['GPUs were not sampled: ...']
    """
    watched = trace.meta.get("watched") and any(len(rank.memory) for rank in trace.ranks)
    repeated = [REPEATED] if watched else []
    if elsewhere and any(len(rank.samples) for rank in trace.ranks):
        where = "mk.Timeline.of(trace).device_samples has them, without hardware=."
        return [*repeated, f"Samples of GPUs belong to the machine of the run: {where}"]
    why = trace.meta.get("gpus_not_sampled", "")
    return repeated + ([str(why)] if why and not elsewhere else [])


def placement_notes(timeline: Timeline, hardware: Hardware) -> list[str]:
    """Return a sentence for tensor parallelism across nodes, and one for the rank that its device cannot hold."""
    notes = []
    mesh = timeline.mesh
    groups = mesh.groups("tp") if mesh is not None and mesh.tp > 1 else []
    if words := spans_nodes(groups, hardware.node_of, hardware.per_node):
        notes.append(words)
    peaks = [sum(held.values()) for held in timeline.memory]
    device, most = hardware.device, max(peaks, default=0)
    if device.memory and most > device.memory:
        rank = peaks.index(most)
        held = timeline.memory[rank]
        words = out_of_memory(most, device.memory, max(held, key=held.__getitem__))
        notes.append(f"Rank {rank} does not fit its {device.name}: {words}.")
    return notes

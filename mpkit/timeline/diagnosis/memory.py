"""Memory: recomputation that saves nothing, and memory near the limit.

kept      what a rank would hold without recomputation: what each recomputed part makes, times the parts that wait for
          their backward at once
useless   if the device had room for that; or, where its memory is not known, if the peak would hardly grow
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.common.units import memory_text, percent, seconds
from mpkit.timeline.diagnosis.evidence import Evidence
from mpkit.timeline.findings import Finding
from mpkit.trace import CATEGORIES, Kind, Lane, PartFlag

__all__ = ["FULL", "GROWS", "memory_near_limit", "useless_recomputation"]

Array = npt.NDArray[Any]

FULL = 0.9
"""The share of a device's memory from which on an allocator has to search, and a longer batch ends the run: what CUDA's
context, the libraries' workspaces and fragments take is not counted here, and comes to some percent."""

GROWS = 0.1
"""The share of the peak by which keeping activations may raise it, where the memory of the device is not known."""

BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


def memory_near_limit(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding for the rank with the least memory left, if that is little."""
    machine, peaks = evidence.machine, evidence.whole.peak_memory_of_run
    if machine is None:
        return
    shares = [
        peak["total"] / memory if (memory := machine.device_of(rank).memory) else 0.0
        for rank, peak in enumerate(peaks)
    ]
    rank = int(np.argmax(shares))
    if shares[rank] < FULL:
        return
    memory, peak = machine.device_of(rank).memory, peaks[rank]
    largest = max(CATEGORIES, key=lambda name: peak[name])
    yield evidence.make_finding(
        "memory near the limit",
        f"{evidence.name_ranks([rank])} holds {memory_text(peak['total'])} of its device's {memory_text(memory)} "
        f"({percent(shares[rank])}), "
        f"most of it {largest} ({memory_text(peak[largest])}).",
        reason="Near the limit the allocator frees and asks again, which stops the device; a longer sequence "
        "ends the run.",
        remedy=_less(largest),
        gain=0.0, by="", ranks=(rank,), check="timeline.peak_memory_of_run", urgent=True,
    )  # fmt: skip


def _less(category: str) -> str:
    ways = {
        "activations": "Smaller micro-batches, recompute='full', or tensor and context parallelism.",
        "params": "zero=3, or more pipeline or tensor parallelism.",
        "grads": "zero=2, or gradients in bf16.",
        "optimizer": "zero=1, offload='optimizer', or an optimizer with fewer states.",
        "buffers": "Smaller buckets, less prefetch, or a loss that is computed in parts.",
    }
    return ways[category]


def useless_recomputation(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding if what is recomputed could have been kept."""
    took = _without_recomputation(evidence)
    if took is None:
        return
    gain = evidence.gain(took)
    if not evidence.worth(gain):
        return
    peaks = [peak["total"] for peak in evidence.whole.peak_memory_of_run]
    if not all(peaks):  # an imported trace without the allocator's events: nothing is known of memory
        return
    kept = [_kept_bytes(evidence, rank) for rank in range(evidence.graph.world_size)]
    memory = [evidence.machine.device_of(r).memory if evidence.machine else 0 for r in range(len(peaks))]
    fits = [
        peak + more <= FULL * most if most else more <= GROWS * peak
        for peak, more, most in zip(peaks, kept, memory, strict=True)
    ]
    if not all(fits):
        return
    rank = int(np.argmax(np.add(peaks, kept)))
    room = (
        f" of {memory_text(memory[rank])}"
        if memory[rank]
        else f", {percent(kept[rank] / max(peaks[rank], 1))} more"
    )
    rows = np.flatnonzero(evidence.spans["kind"] == Kind.RECOMPUTE)
    yield evidence.make_finding(
        "useless recomputation",
        f"Recomputation takes {seconds(gain)} per step ({evidence.share(gain)}), and without it rank "
        f"{evidence.whole.rank_number(rank)}, the fullest, would hold about "
        f"{memory_text(peaks[rank] + kept[rank])}{room} instead of {memory_text(peaks[rank])}.",
        reason="Activations that fit need not be computed twice.",
        remedy="recompute='none', or recompute only some of the blocks.",
        gain=gain, rows=rows, check="timeline.peak_memory_of_run",
    )  # fmt: skip


def _without_recomputation(evidence: Evidence) -> Array | None:
    """Return the durations without recomputation; None if there is none. Within a backward, it is taken off that."""
    spans, graph = evidence.spans, evidence.graph
    again = np.flatnonzero((spans["kind"] == Kind.RECOMPUTE) & (spans["lane"] == Lane.COMPUTE))
    if not len(again):
        return None
    outer = again[spans["depth"][again] == 0]
    took = graph.durations_without(graph.nodes_of(outer))
    back = evidence.work.row[np.isin(evidence.work.kind, BACKWARDS)]
    for row in again[spans["depth"][again] > 0].tolist():
        length = float(spans["end"][row] - spans["start"][row])
        around = (spans["rank"][back] == spans["rank"][row]) & (spans["start"][back] <= spans["start"][row])
        for node in graph.of_row.get(int(back[around][-1]), []) if around.any() else []:
            less = min(length, float(took[node]))
            took[node] -= less
            length -= less
    return took


def _kept_bytes(evidence: Evidence, rank: int) -> float:
    """Return the bytes that a rank would hold more at its peak if it recomputed nothing."""
    spans, held = evidence.spans, evidence.one.held
    own = spans[spans["rank"] == rank]
    again = own[own["kind"] == Kind.RECOMPUTE]
    changes = held[(held["rank"] == rank) & (held["category"] == CATEGORIES.index("activations"))]
    if not len(again) or not len(changes):
        return 0.0

    def total_at(times: Array) -> Array:
        rows = np.searchsorted(changes["time"], times, side="right") - 1
        return np.asarray(changes["total"][np.maximum(rows, 0)])

    makes = float(np.maximum(total_at(again["end"]).astype(float) - total_at(again["start"]), 0.0).sum())
    forwards = own[(own["kind"] == Kind.FORWARD) & (own["depth"] == 0)]
    backs = own[np.isin(own["kind"], (Kind.BACKWARD, Kind.INPUT_GRAD)) & (own["depth"] == 0)]
    # Of an action in several parts the last one counts.
    forwards, backs = (own[own["flags"] & PartFlag.GOES_ON == 0] for own in (forwards, backs))
    times = np.concatenate([forwards["end"], backs["end"]])
    change = np.concatenate([np.ones(len(forwards)), -np.ones(len(backs))])
    most = float(np.cumsum(change[np.argsort(times, kind="stable")]).max(initial=1.0))
    return makes * min(most / max(len(forwards), 1), 1.0)

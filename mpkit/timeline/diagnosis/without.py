"""What the step would gain without some of its pieces: each rule chooses them, and the step is played again.

data loading            with each rank's samples there at once
synchronizing call      without barriers, copies of a few bytes to the host (loss.item(), print(loss)), and the gaps
                        behind them, in which the host launches everything anew
host-bound              without all other gaps between operations
copies                  without copies of more bytes between device and host
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.common.units import bytes_text, seconds
from mpkit.timeline.dependencies.graph import Node
from mpkit.timeline.diagnosis.evidence import WORTH, Evidence
from mpkit.timeline.diagnosis.stragglers import later_host_removed, lost_time, split_at_gap
from mpkit.timeline.findings import Finding
from mpkit.trace import Kind

Array = npt.NDArray[Any]

FEW = 1024
"""Bytes up to which a copy to the host is a number that the program looks at, and not data."""

UNLIKE = 2.0
"""How many times as long as the others ranks must load to be named alone."""


def slow_loading(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding if ranks wait for their share of the batch."""
    rows, times = evidence.rows(Kind.DATA), np.array(evidence.one.data_time)
    others, longer = split_at_gap(times, WORTH * evidence.path.step_time)
    apart = len(longer) > 0 and times[longer].min() >= UNLIKE * times[others].max()
    ranks = tuple(longer.tolist()) if apart else tuple(np.flatnonzero(times > 0).tolist())
    beside = (
        f"; the median of the others loads for {seconds(float(np.median(times[others])))}" if apart else ""
    )
    beside += f"; {lost_time(evidence, ranks[0])}" if apart and len(ranks) == 1 else ""
    return evidence.findings(
        "data loading", gain=evidence.gain_without(rows), rows=rows, ranks=ranks,
        load="loads" if len(ranks) == 1 else "load", others=beside,
        each=seconds(float(times[list(ranks)].sum()) / max(len(ranks), 1)),
    )  # fmt: skip


def synchronizing_calls(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding if calls in the loop wait for the device, or for all ranks."""
    graph, spans = evidence.graph, evidence.spans
    rows = _synchronizing(evidence)
    if not len(rows):
        return []
    barriers = rows[spans["kind"][rows] == Kind.BARRIER]
    nodes = np.concatenate([graph.nodes_of(rows), _gaps_behind(evidence, rows)]).astype(int)
    without = graph.play(graph.durations_without(nodes), without={*graph.nodes_of(barriers).tolist()})
    what = "barriers" if len(barriers) else "copies of a few bytes to the host"
    return evidence.findings(
        "synchronizing call", what, gain=evidence.path.step_time - float(without.max(initial=0.0)), rows=rows,
        what=what, count=f"{len(rows) / len(np.unique(spans['rank'][rows])):g}",
    )  # fmt: skip


def _synchronizing(evidence: Evidence) -> Array:
    """Return the rows of spans that make the host wait for its device, or all ranks for each other."""
    spans, rows = evidence.spans, evidence.rows(Kind.BARRIER, Kind.COPY_TO_HOST)
    return np.asarray(rows[(spans["kind"][rows] == Kind.BARRIER) | (spans["bytes"][rows] <= FEW)])


def _gaps_behind(evidence: Evidence, rows: Array) -> list[int]:
    """Return the gaps that begin when one of these spans ends."""
    graph = evidence.graph
    own = {node for row in rows.tolist() for node in graph.of_row.get(row, ())}
    gaps = np.flatnonzero(graph.kind == Node.GAP).tolist()
    return [gap for gap in gaps if own.intersection(graph.needs[gap])]


def host_bound(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding if devices stand still between operations for no other reason than their host."""
    graph = evidence.graph
    behind = _gaps_behind(evidence, _synchronizing(evidence))
    gaps = np.setdiff1d(np.flatnonzero(graph.kind == Node.GAP), behind).astype(int)
    if not len(gaps):
        return []
    even = later_host_removed(evidence)
    without = even.copy()
    without[gaps] = 0.0
    ranks = np.unique(graph.rank[gaps]).tolist()
    idle = float(graph.took[gaps].sum()) / len(ranks)
    trains = bool(np.isin(evidence.spans["kind"], (Kind.BACKWARD, Kind.OPTIMIZER)).any())
    return evidence.findings(
        "host-bound", gain=graph.time_with(even) - graph.time_with(without), rows=graph.row[gaps].tolist(), ranks=ranks,
        each=seconds(idle), idle_share=evidence.share(idle), count=f"{len(gaps) / len(ranks):.0f}",
        gap=seconds(float(graph.took[gaps].mean())),
        larger="larger micro-batches, fused optimizers" if trains else "larger batches",
    )  # fmt: skip


def copies(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding if ranks wait for copies between device and host."""
    rows = np.setdiff1d(evidence.rows(Kind.COPY_TO_DEVICE, Kind.COPY_TO_HOST), _synchronizing(evidence))
    spans = evidence.spans[rows]
    many = max(len(np.unique(spans["rank"])), 1)
    return evidence.findings(
        "copies", gain=evidence.gain_without(rows), rows=rows, y="y" if many > 1 else "ies",
        size=bytes_text(float(spans["bytes"].sum()) / many),
        each=seconds(float((spans["end"] - spans["start"]).sum()) / many) + " each" * (many > 1),
    )  # fmt: skip

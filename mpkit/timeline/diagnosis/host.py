"""The host: a device that has nothing to do because its host has not launched anything yet, or has no data for it.

synchronizing   barriers, and copies of a few bytes to the host (loss.item(), print(loss)), after which the host has to
                launch everything anew; replayed without them and without the gap behind them
host-bound      all other gaps between operations; replayed without gaps
inputs          loading of data, replayed with the data there at once; and copies, replayed without them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mpkit.common.units import bytes_text, percent, seconds
from mpkit.timeline.dependencies.graph import Node
from mpkit.timeline.diagnosis.evidence import Evidence
from mpkit.timeline.diagnosis.lateness import HOST, late_ranks, lost_time, on_time
from mpkit.timeline.findings import Finding
from mpkit.trace import Kind

__all__ = ["FEW", "UNLIKE", "copies", "host_bound", "is_synchronizing", "slow_loading", "synchronizing_calls"]


FEW = 1024
"""Bytes up to which a copy to the host is a number that the program looks at, and not data."""


def is_synchronizing(evidence: Evidence, row: int) -> bool:
    """Return whether a span makes the host wait for its device, or all ranks for each other."""
    span = evidence.spans[row]
    return bool(span["kind"] == Kind.BARRIER or (span["kind"] == Kind.COPY_TO_HOST and span["bytes"] <= FEW))


def synchronizing_calls(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding if calls in the loop wait for the device, or for all ranks."""
    graph, spans = evidence.graph, evidence.spans
    rows = [row for row in sorted(graph.of_row) if is_synchronizing(evidence, row)]
    barriers = [row for row in rows if spans["kind"][row] == Kind.BARRIER]
    if not rows:
        return
    took = graph.durations_without(
        np.concatenate([graph.nodes_of(rows), _gaps_behind(evidence, rows)]).astype(int)
    )
    dropped = set(graph.nodes_of(barriers).tolist())
    gain = evidence.path.step_time - float(graph.play(took, without=dropped).max(initial=0.0))
    if not evidence.worth(gain):
        return
    count = len(rows) / max(len({int(spans["rank"][row]) for row in rows}), 1)
    what = "barriers" if barriers else "copies of a few bytes to the host"
    yield evidence.make_finding(
        "synchronizing call",
        f"Each rank makes {count:g} synchronizing calls per step ({what}); without them the step would be "
        f"{seconds(gain)} "
        f"shorter, {evidence.share(gain)}.",
        reason="Every rank waits for the slowest at each barrier, even where nothing is exchanged."
        if barriers
        else "The host waits until its device has finished, and the device then waits until the host launches more.",
        remedy="Take loss.item(), print(tensor), .cpu(), torch.cuda.synchronize() and barriers out of the loop; "
        "log every "
        "100 steps, and keep running sums on the device.",
        gain=gain, rows=rows, check="timeline.step({step}).to_dataframe().kind.value_counts()",
    )  # fmt: skip


def _gaps_behind(evidence: Evidence, rows: Sequence[int]) -> list[int]:
    """Return the gaps that begin when one of these spans ends."""
    graph = evidence.graph
    own = {node for row in rows for node in graph.of_row.get(row, ())}
    return [
        gap for gap in np.flatnonzero(graph.kind == Node.GAP).tolist() if own.intersection(graph.needs[gap])
    ]


def host_bound(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding if devices stand still between operations for no other reason than their host."""
    graph = evidence.graph
    behind = set(_gaps_behind(evidence, [row for row in graph.of_row if is_synchronizing(evidence, row)]))
    gaps = np.array(
        [gap for gap in np.flatnonzero(graph.kind == Node.GAP).tolist() if gap not in behind], int
    )
    # What one rank's host is later than the others' is a straggler's.
    even = on_time(evidence, [late for late in late_ranks(evidence) if late.cause == HOST])
    without = even.copy()
    without[gaps] = 0.0
    gain = graph.time_with(even) - graph.time_with(without)
    if not len(gaps) or not evidence.worth(gain):
        return
    ranks = np.unique(graph.rank[gaps]).tolist()
    idle = float(graph.took[gaps].sum()) / len(ranks)
    trains = bool(np.isin(evidence.spans["kind"], (Kind.BACKWARD, Kind.OPTIMIZER)).any())
    larger = "larger micro-batches, fused optimizers" if trains else "larger batches"
    yield evidence.make_finding(
        "host-bound",
        f"Devices stand still for {seconds(idle)} per step ({percent(idle / evidence.path.step_time)}) between "
        f"operations, in "
        f"{len(gaps) / len(ranks):.0f} gaps of {seconds(float(graph.took[gaps].mean()))} on average, while "
        f"their host has "
        "launched nothing.",
        reason="Kernels are shorter than the time that Python takes to launch the next one, or Python does "
        "something else.",
        remedy=f"torch.compile, CUDA graphs, {larger}; less Python in the loop.",
        gain=gain, rows=graph.row[gaps].tolist(), ranks=ranks,
        check="timeline.critical_path({step}).by_kind['gap']",
    )  # fmt: skip


UNLIKE = 2.0
"""How many times as long as the median rank a rank must load to be named alone."""


def slow_loading(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding if ranks wait for their share of the batch."""
    rows = evidence.rows(Kind.DATA)
    gain = evidence.gain(evidence.graph.durations_without(evidence.graph.nodes_of(rows)))
    if not evidence.worth(gain):
        return
    times = np.array(evidence.one.data_time)
    slowest = int(np.argmax(times))
    alone = times[slowest] >= UNLIKE * float(np.median(times)) and len(times) > 1
    ranks = (slowest,) if alone else tuple(np.flatnonzero(times > 0).tolist())
    median = seconds(float(np.median(times)))
    others = f"; the median rank loads for {median}; {lost_time(evidence, slowest)}" if alone else ""
    load = "loads" if len(ranks) == 1 else "load"
    yield evidence.make_finding(
        "data loading",
        f"{evidence.name_ranks(ranks)} {load} data for {seconds(float(times[list(ranks)].mean()))} per step before "
        f"computing{others}.",
        reason="A rank that loads its samples itself does nothing else meanwhile, and the others wait for it in "
        "the first "
        "collective or message.",
        remedy="More workers that load ahead (mk.Batches(..., workers=4), DataLoader(num_workers=, prefetch_factor=)), "
        "cheaper decoding, data on a local disk.",
        gain=gain, rows=rows, ranks=ranks, check="timeline.step({step}).data_time",
    )  # fmt: skip


def copies(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding if ranks wait for copies between device and host."""
    rows = evidence.rows(Kind.COPY_TO_DEVICE, Kind.COPY_TO_HOST)
    rows = np.array([row for row in rows.tolist() if not is_synchronizing(evidence, row)], int)
    gain = evidence.gain(evidence.graph.durations_without(evidence.graph.nodes_of(rows)))
    if not evidence.worth(gain):
        return
    spans = evidence.spans[rows]
    ranks = np.unique(spans["rank"]).tolist()
    each = float((spans["end"] - spans["start"]).sum()) / len(ranks)
    yield evidence.make_finding(
        "copies",
        f"{evidence.name_ranks(ranks)} cop{'y' if len(ranks) > 1 else 'ies'} "
        f"{bytes_text(float(spans['bytes'].sum()) / len(ranks))} a "
        f"step between device and host, {seconds(each)}{' each' * (len(ranks) > 1)}, while computing nothing.",
        reason="Copies over PCIe are slow beside the device's own memory, and here nothing overlaps with them.",
        remedy="Pinned memory and non_blocking=True; copy the next batch while this one computes; leave the "
        "optimizer's "
        "states on the device if they fit (no offload).",
        gain=gain, rows=rows, check="timeline.step({step}).to_dataframe().groupby('kind').bytes.sum()",
    )  # fmt: skip

"""What the step would gain without some of its pieces: each rule chooses them, and the step is played again.

data loading            with each rank's samples there at once
synchronizing call      without barriers, copies of a few bytes to the host (loss.item(), print(loss)), and the gaps
                        behind them, in which the host launches everything anew
host-bound              without all other gaps between operations
copies                  without copies of more bytes between device and host
slow link               with the seconds that other ranks take for the same kind and about the same bytes
exposed communication   without all communication of a kind; waiting for a late rank stays. The reason says how
                        much of it begins when the backward has ended, though buckets can begin during it (Li et al.
                        2020, section 3.2.3), and how much of it is latency, since each message is small
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.units import bytes_text, percent, seconds
from mpkit.timeline.dependencies.graph import Node
from mpkit.timeline.diagnosis.evidence import WORTH, Evidence
from mpkit.timeline.diagnosis.uneven import later_host_removed, lost_time, split_at_gap
from mpkit.timeline.findings import Finding
from mpkit.trace import Kind, Lane

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
    usual = seconds(float(np.median(times[others])))
    beside = f"; the median of the others loads for {usual}" if apart else ""
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


SLOW = 1.5
"""How many times as long as between other ranks a communication must take on a slow link."""

ALIKE = 2.0
"""Payloads within this factor are compared with each other."""

MOST = 0.5
"""The share of communication that begins too late, or is latency, from which on that is said."""

MESSAGES = (int(Kind.SEND), int(Kind.RECV))
BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


class _Meeting(NamedTuple):
    """A communication."""

    ranks: tuple[int, ...]
    kind: int
    nbytes: int
    rows: tuple[int, ...]  # of its spans
    took: float  # seconds once it was ready


def _meetings(evidence: Evidence) -> list[_Meeting]:
    """Return the step's communications, but for those of an imported trace whose bytes are not in its file."""
    graph, spans = evidence.graph, evidence.spans
    nodes: dict[int, list[int]] = defaultdict(list)
    for node, ready in graph.ready_of.items():
        nodes[ready].append(node)
    mets = []
    for each in nodes.values():
        rows = tuple(int(graph.row[node]) for node in each)
        one = spans[rows[0]]
        kind = int(one["kind"])
        if "imported" in evidence.whole.meta and not one["bytes"] and kind != Kind.BARRIER:
            continue
        ranks, took = {int(spans["rank"][row]) for row in rows}, max(float(graph.took[node]) for node in each)
        if kind in MESSAGES:
            ranks, kind = ranks | {int(one["peer"])}, MESSAGES[1]
        mets.append(_Meeting(tuple(sorted(ranks)), kind, int(one["bytes"]), rows, took))
    return mets


# ---- slow links


def slow_links(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding for each link that takes longer than others do for as much."""
    found, alike = list[Finding](), defaultdict[tuple[int, int], list[_Meeting]](list)
    for met in _meetings(evidence):
        alike[met.kind, len(met.ranks)].append(met)
    for mets in alike.values():
        links = sorted({met.ranks for met in mets})
        size, took_all = np.array([met.nbytes for met in mets]), np.array([met.took for met in mets])
        for link in links if len(links) > 2 else []:
            others = np.array([met.ranks != link for met in mets])
            own = [met for met in mets if met.ranks == link]
            by_size = {each: _usual(each, size[others], took_all[others]) for each in {m.nbytes for m in own}}
            known = [(met, by_size[met.nbytes]) for met in own if by_size[met.nbytes] > 0]
            should, took = sum(usual for _, usual in known), sum(met.took for met, _ in known)
            if not known or took < SLOW * should:
                continue
            rows = [row for met, _ in known for row in met.rows]
            ratios = ((min(usual / met.took, 1.0) if met.took else 1.0, met.rows) for met, usual in known)
            factors = [ratio for ratio, its_rows in ratios for _ in its_rows]
            machine = evidence.machine
            apart = machine is not None and len({machine.node_of(rank) for rank in link}) > 1
            found += evidence.findings(
                "slow link", gain=evidence.gain_scaled(rows, factors), rows=rows, ranks=link,
                size=bytes_text(float(np.mean([met.nbytes for met, _ in known]))), each=seconds(took / len(known)),
                ratio=f"{took / should if should else np.inf:.1f}", rank=link[-1],
                across=" They are on different nodes." * apart,
            )  # fmt: skip
    return found


def _usual(nbytes: int, size: Array, took: Array) -> float:
    """Return the median seconds of other ranks' communications of about so many bytes; 0 if there are none."""
    near = took[(size <= ALIKE * nbytes) & (nbytes <= ALIKE * size)]
    return float(np.median(near)) if len(near) else 0.0


# ---- what nothing hides


def exposed_communication(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding for each kind of communication that the step would be shorter without, and no rule explains."""
    spans, found, mets = evidence.spans, list[Finding](), _meetings(evidence)
    kinds = {Kind(int(kind)) for kind in np.unique(spans["kind"][spans["lane"] == Lane.COMM])}
    busy, exposed = float(np.mean(evidence.one.comm_time)), float(np.mean(evidence.one.exposed_comm))
    for kind in sorted(kinds - {Kind.SEND, Kind.BARRIER}):
        rows = evidence.rows(*((Kind.SEND, Kind.RECV) if kind == Kind.RECV else (kind,)))
        whole, latency = evidence.gain_without(rows), _latency(evidence, [m for m in mets if m.kind == kind])
        mine = set(rows.tolist())
        explained = max((each.gain for each in before if mine & set(each.ops)), default=0.0)
        found += evidence.findings(
            "exposed communication", kind.word, gain=whole - explained, rows=rows,
            reason=latency or _late_reason(evidence, rows), whole=evidence.share(whole), time=seconds(whole),
            count=len(rows), word=kind.word, busy=seconds(busy), hidden=seconds(busy - exposed),
            what="messages between stages" if kind == Kind.RECV else kind.word.replace("_", "-"),
        )  # fmt: skip
    return found


def _late_reason(evidence: Evidence, rows: Array) -> str:
    """Say how much of it ran while its own rank had nothing left to compute in the step's backward; "" if little."""
    spans = evidence.spans
    back = np.isin(spans["kind"], BACKWARDS) & (spans["depth"] == 0)
    last = np.full(evidence.graph.world_size, -np.inf)
    np.maximum.at(last, spans["rank"][back], spans["end"][back])
    last[np.isinf(last)] = np.inf
    times = spans["end"][rows] - spans["start"][rows]
    late = spans["start"][rows] >= last[spans["rank"][rows]]
    share = float(times[late].sum()) / max(float(times.sum()), 1e-30)
    begins = "of its time begins when the backward has ended, so there is nothing to hide it behind."
    return f"{share:.0%} {begins}" if share > MOST else ""


def _latency(evidence: Evidence, mets: Sequence[_Meeting]) -> str:
    """Say how much of these communications' time they would take without bytes; "" if little, or not known."""
    machine = evidence.machine
    whole = sum(machine.time(met.kind, met.nbytes, met.ranks) for met in mets) if machine else 0.0
    share = sum(machine.time(met.kind, 0, met.ranks) for met in mets) / whole if machine and whole else 0.0
    if share <= MOST:
        return ""
    size = bytes_text(float(np.mean([met.nbytes for met in mets])))
    return (
        f"{percent(share)} of its time is latency: {len(mets):,} calls have {size} on average. Merge them where no "
        "layer waits for its own (larger buckets), or put more into each, by fewer and larger micro-batches."
    )

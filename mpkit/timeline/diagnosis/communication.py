"""Communication that could be faster: over a slow link, in small messages, or begun earlier.

slow link        seconds of the same kind and about the same bytes, between other ranks
small messages   time at zero bytes, from the machine's link or the shortest one seen, against the time that they take
late bucket      backward makes gradients in the order in which their buckets are issued, so that a bucket can begin
                 about when the backward has made as large a share of its time as this bucket and those before it have
                 of all bytes (Li et al. 2020, section 3.2.3); it is late if it is issued only once the backward has
                 ended, though it is not the last one
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.common.units import bytes_text, percent, seconds
from mpkit.timeline.diagnosis.evidence import Evidence
from mpkit.timeline.findings import Finding
from mpkit.trace import Kind

__all__ = ["late_buckets", "slow_links", "small_messages"]

Array = npt.NDArray[Any]

SLOW = 1.5
"""How many times as long as between other ranks a communication must take on a slow link."""

ALIKE = 2.0
"""Payloads within this factor are compared with each other."""

MANY, LATENCY, MERGED = 8, 0.5, 8
"""Small messages are at least so many collectives of a kind, whose time is latency for at least this share; and so many
of them are merged into one in the replay."""

LARGER = 2
"""Collectives between layers cannot be merged; the replay takes micro-batches that are so many times as large."""

MESSAGES = (int(Kind.SEND), int(Kind.RECV))
BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
REDUCES = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)


class _Meeting(NamedTuple):
    """A communication: its ranks, kind, bytes, the rows of its spans, and its seconds once it was ready."""

    ranks: tuple[int, ...]
    kind: int
    nbytes: int
    rows: tuple[int, ...]
    took: float


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
            factors = [
                min(usual / met.took, 1.0) if met.took else 1.0 for met, usual in known for _ in met.rows
            ]
            nodes = (
                {evidence.machine.node_of(rank) for rank in link} if evidence.machine is not None else set()
            )
            found += evidence.findings(
                "slow link", gain=evidence.gain_scaled(rows, factors), rows=rows, ranks=link,
                size=bytes_text(float(np.mean([met.nbytes for met, _ in known]))), each=seconds(took / len(known)),
                ratio=f"{took / should if should else np.inf:.1f}", rank=link[-1],
                across=" They are on different nodes." if len(nodes) > 1 else "",
            )  # fmt: skip
    return found


def _usual(nbytes: int, size: Array, took: Array) -> float:
    """Return the median seconds of other ranks' communications of about so many bytes; 0 if there are none."""
    near = took[(size <= ALIKE * nbytes) & (nbytes <= ALIKE * size)]
    return float(np.median(near)) if len(near) else 0.0


def small_messages(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding for many collectives of one kind and group that are nearly all latency."""
    found, alike = list[Finding](), defaultdict[tuple[int, tuple[int, ...]], list[_Meeting]](list)
    for met in _meetings(evidence):
        if met.kind not in (*MESSAGES, Kind.BARRIER):
            alike[met.kind, met.ranks].append(met)
    for (kind, ranks), mets in alike.items():
        taking = [met.took for met in mets if met.took > 0]
        share = _latency_share(evidence, mets) if len(taking) >= MANY else 0.0
        if share < LATENCY:
            continue
        within = _are_of_layers(evidence, ranks, exchange=kind == Kind.ALL_TO_ALL)
        merged, mean = LARGER if within else MERGED, float(np.mean(taking))
        saved = share * mean * (1 - 1 / merged)
        rows = [row for met in mets for row in met.rows]
        factors = [max(1 - saved / met.took, 0.0) if met.took else 1.0 for met in mets for _ in met.rows]
        found += evidence.findings(
            "small messages", "layers" if within else "gradients", gain=evidence.gain_scaled(rows, factors), rows=rows,
            count=len(mets), word=Kind(kind).word.replace("_", "-"), merged=merged, each=seconds(mean),
            size=bytes_text(float(np.mean([met.nbytes for met in mets]))), share=percent(share),
        )  # fmt: skip
    return found


def _are_of_layers(evidence: Evidence, ranks: tuple[int, ...], *, exchange: bool) -> bool:
    """Return whether a group shares layers, sequences or, of all-to-alls, experts: each layer waits for its own."""
    plan = evidence.plan
    if plan is None or plan.ranks <= max(ranks):
        return False
    axes = ("tp", "cp", *(("ep",) if exchange else ()))
    return len(ranks) > 1 and ranks in {tuple(group) for axis in axes for group in plan.mesh.groups(axis)}


def _latency_share(evidence: Evidence, mets: Sequence[_Meeting]) -> float:
    """Return the share of these communications' time that they would take without bytes.

    By the machine's link, if it is known; else the shortest one seen counts as latency.
    """
    if evidence.machine is None:
        taking = [met.took for met in mets if met.took > 0]
        return min(taking) / float(np.mean(taking))
    times = [evidence.machine.time(met.kind, met.nbytes, met.ranks) for met in mets]
    whole = sum(times)
    return len(mets) * evidence.machine.time(mets[0].kind, 0, mets[0].ranks) / whole if whole else 0.0


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


class _Late(NamedTuple):
    """A bucket that a rank issued late.

    Attributes:
        row: of its span.
        number, of: its place among the rank's buckets of one group, from 1, and how many there are.
        seconds: how much later it was issued than its gradients were there.
        backward: the row of the backward that made them.
        made: seconds of that backward until they were there.
    """

    row: int
    number: int
    of: int
    seconds: float
    backward: int
    made: float


def late_buckets(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding if buckets are issued after the backward although their gradients were there before."""
    graph, late = evidence.graph, _late(evidence)
    if not late:
        return []
    took, instead = graph.took.copy(), dict[int, tuple[int, ...]]()
    for each in late:
        for node in graph.of_row.get(each.row, []):
            if (ready := graph.ready_of.get(node)) is not None:
                begin = graph.of_row[each.backward][0]
                instead[ready] = instead.get(ready, ()) + graph.needs[begin]
                took[ready] = max(took[ready], each.made)
    gain = evidence.path.step_time - float(graph.play(took, instead=instead).max(initial=0.0))
    first = max(late, key=lambda each: (each.seconds, -each.number))
    same = [each for each in late if each.number == first.number]
    behind = len({each.number for each in late}) - 1
    more = f", and so do {behind} others" if behind > 1 else ", and so does another one" if behind else ""
    return evidence.findings(
        "late bucket", gain=gain, rows=[each.row for each in same] + [each.row for each in late if each not in same],
        number=first.number, of=first.of, more=more, late=seconds(first.seconds),
        word=Kind(int(evidence.spans["kind"][first.row])).word,
    )  # fmt: skip


def _late(evidence: Evidence) -> list[_Late]:
    spans, found = evidence.spans, list[_Late]()
    actions = (spans["depth"] == 0) & np.isin(spans["kind"], BACKWARDS)
    reduces = np.isin(spans["kind"], REDUCES)
    for rank in range(evidence.graph.world_size):
        backwards = np.flatnonzero(actions & (spans["rank"] == rank) & (spans["end"] > spans["start"]))
        rows = np.flatnonzero(reduces & (spans["rank"] == rank))
        for group in np.unique(spans["group"][rows]).tolist() if len(backwards) else []:
            mine = rows[spans["group"][rows] == group]
            last = int(backwards[np.argmax(spans["end"][backwards])])
            found += _late_of(spans, mine[np.argsort(spans["issued"][mine], kind="stable")], last)
    return found


def _late_of(spans: Array, rows: Array, backward: int) -> list[_Late]:
    """Return the late ones of a rank's buckets of one group, in the order in which they were issued."""
    start, end = float(spans["start"][backward]), float(spans["end"][backward])
    rows = rows[spans["issued"][rows] >= start]  # those before belong to earlier backwards
    size = spans["bytes"][rows].astype(float)
    if len(rows) < 2 or not size.sum():
        return []
    ready = start + (end - start) * np.cumsum(size) / size.sum()
    issued, close = spans["issued"][rows], 1e-6 * (end - start)
    return [
        _Late(row, at + 1, len(rows), float(issued[at] - ready[at]), backward, float(ready[at] - start))
        for at, row in enumerate(rows.tolist()[:-1])
        if issued[at] >= end - close
    ]

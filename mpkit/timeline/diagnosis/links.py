"""Links: one that is slower than others; and collectives so small that they are all latency.

slow link        seconds of the same kind and about the same bytes, between other ranks
small messages   time at zero bytes, from the machine's link or the shortest one seen, against the time that they take
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.common.units import bytes_text, percent, seconds
from mpkit.timeline.diagnosis.evidence import Evidence
from mpkit.timeline.findings import Finding
from mpkit.trace import Kind

__all__ = ["SLOW", "slow_links", "small_messages"]

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

OF_GRADIENTS = "Merge them: larger buckets (bucket_mb, bucket_cap_mb), parameters flattened into one tensor."
OF_LAYERS = (
    "Each layer waits for its own, so they cannot be merged: put more into each, by fewer and larger micro-batches, or "
    "let fewer ranks share a layer, a sequence or experts (tp, cp, ep)."
)

MESSAGES = (int(Kind.SEND), int(Kind.RECV))


class _Meeting(NamedTuple):
    """A communication: its ranks, kind, bytes, the rows of its spans, and its seconds once it was ready."""

    ranks: tuple[int, ...]
    kind: int
    nbytes: int
    rows: tuple[int, ...]
    took: float


def slow_links(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding for each link that takes longer than others do for as much."""
    alike: dict[tuple[int, int], list[_Meeting]] = defaultdict(list)
    for met in _meetings(evidence):
        alike[met.kind, len(met.ranks)].append(met)
    for mets in alike.values():
        links = sorted({met.ranks for met in mets})
        size, took_all = np.array([met.nbytes for met in mets]), np.array([met.took for met in mets])
        numbers = {link: number for number, link in enumerate(links)}
        of_link = np.array([numbers[met.ranks] for met in mets])
        for number, link in enumerate(links if len(links) > 2 else []):
            own = [met for met in mets if met.ranks == link]
            others = of_link != number
            by_size = {
                nbytes: _usual(nbytes, size[others], took_all[others]) for nbytes in {m.nbytes for m in own}
            }
            usual = {met: by_size[met.nbytes] for met in own}
            known = [met for met in own if usual[met] > 0]
            should, took = sum(usual[met] for met in known), sum(met.took for met in known)
            if not known or took < SLOW * should:
                continue
            rows = [row for met in known for row in met.rows]
            factors = [
                min(usual[met] / met.took, 1.0) if met.took else 1.0 for met in known for _ in met.rows
            ]
            gain = evidence.gain(evidence.scale_durations(rows, factors))
            if evidence.worth(gain):
                yield _slow(evidence, link, took, should, known, gain, rows)


def _usual(nbytes: int, size: Array, took: Array) -> float:
    """Return the median seconds of other ranks' communications of about so many bytes; 0 if there are none."""
    near = took[(size <= ALIKE * nbytes) & (nbytes <= ALIKE * size)]
    return float(np.median(near)) if len(near) else 0.0


def _slow(
    evidence: Evidence, link: tuple[int, ...], took: float, should: float, mets: Sequence[_Meeting], gain: float,
    rows: Sequence[int],
) -> Finding:  # fmt: skip
    nodes = {evidence.machine.node_of(rank) for rank in link} if evidence.machine is not None else set()
    across = " They are on different nodes." if len(nodes) > 1 else ""
    named = evidence.name_ranks(link)
    size = float(np.mean([met.nbytes for met in mets]))
    return evidence.make_finding(
        "slow link",
        f"Between {named[0].lower()}{named[1:]}, {bytes_text(size)} take {seconds(took / len(mets))}, "
        f"{took / should:.1f} times as long as between other ranks.{across}",
        reason="Those who need what comes over the slow link wait for it, and those who need theirs wait as well.",
        remedy="Look at this link alone (mpkit doctor; nvidia-smi topo -m; a cable, a switch, another job), and place "
        "the ranks so that the axis with the most bytes stays on fast links (plan.placement(model, hardware=...)).",
        gain=gain, rows=rows, ranks=link, check=f"timeline.step({{step}}).comm_time[{link[-1]}]",
    )  # fmt: skip


def small_messages(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding for many collectives of one kind and group that are nearly all latency."""
    alike: dict[tuple[int, tuple[int, ...]], list[_Meeting]] = defaultdict(list)
    for met in _meetings(evidence):
        if met.kind not in (*MESSAGES, Kind.BARRIER):
            alike[met.kind, met.ranks].append(met)
    for (kind, ranks), mets in alike.items():
        taking = [met.took for met in mets if met.took > 0]
        if len(taking) < MANY:
            continue
        share = _latency_share(evidence, mets)
        if share < LATENCY:
            continue
        within = _are_of_layers(evidence, ranks, exchange=kind == Kind.ALL_TO_ALL)
        merged, remedy = (LARGER, OF_LAYERS) if within else (MERGED, OF_GRADIENTS)
        saved = share * float(np.mean(taking)) * (1 - 1 / merged)
        rows = [row for met in mets for row in met.rows]
        factors = [max(1 - saved / met.took, 0.0) if met.took else 1.0 for met in mets for _ in met.rows]
        gain = evidence.gain(evidence.scale_durations(rows, factors))
        if evidence.worth(gain):
            word = Kind(kind).word.replace("_", "-")
            yield evidence.make_finding(
                "small messages",
                f"{len(mets)} {word}s per step of {bytes_text(float(np.mean([met.nbytes for met in mets])))} on "
                f"average take "
                f"{seconds(float(np.mean(taking)))} each, of which {percent(share)} is latency.",
                reason="Each collective takes at least the link's latency, however few bytes it has.",
                remedy=f"{remedy} The replay merges {merged} into one.",
                gain=gain, rows=rows, check="timeline.step({step}).comm_bytes",
            )  # fmt: skip


def _are_of_layers(evidence: Evidence, ranks: tuple[int, ...], *, exchange: bool) -> bool:
    """Return whether a group shares layers, sequences or experts, so that each layer waits for its own collectives.

    Args:
        exchange: whether the collectives are all-to-alls.
    """
    plan = evidence.plan
    if plan is None or plan.ranks <= max(ranks):
        return False
    within = [
        group
        for axis in ("tp", "cp", "cp_ring", "cp_ulysses", *(("ep",) if exchange else ()))
        for group in plan.mesh.groups(axis)
        if len(group) > 1
    ]
    return ranks in {tuple(group) for group in within}


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
        ranks = {int(spans["rank"][row]) for row in rows} | (
            {int(one["peer"])} if kind in MESSAGES else set()
        )
        took = max(float(graph.took[node]) for node in each)
        mets.append(
            _Meeting(
                tuple(sorted(ranks)), MESSAGES[1] if kind in MESSAGES else kind, int(one["bytes"]), rows, took
            )
        )
    return mets

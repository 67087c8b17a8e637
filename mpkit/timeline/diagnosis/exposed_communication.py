"""Exposed communication: what nothing hides, beyond what special rules have explained.

replay   the step with all communication of a kind taking no time; waiting for a late rank stays
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mpkit.common.units import seconds
from mpkit.timeline.diagnosis.evidence import Evidence
from mpkit.timeline.findings import Finding
from mpkit.trace import Kind

__all__ = ["exposed_communication"]

REMEDIES = {
    Kind.ALL_REDUCE: "Hide it behind the backward (buckets that start early), send fewer bytes (bf16 gradients, "
    "gradient "
    "accumulation, larger batches per rank), or use a faster link.",
    Kind.REDUCE_SCATTER: "Let the reduction of one block overlap with the backward of the next, or use a lower "
    "ZeRO stage.",
    Kind.ALL_GATHER: "Gather the next block while this one computes (prefetch), keep weights gathered between "
    "forward and "
    "backward, or use a lower ZeRO stage.",
    Kind.RECV: "Keep neighbouring stages on one node, or run more micro-batches so that messages hide behind compute.",
    Kind.ALL_TO_ALL: "Keep the group on one node, or overlap it with the computation of another part.",
}


def exposed_communication(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding for each kind of communication that the step would be shorter without."""
    kinds = {Kind(int(kind)) for kind in np.unique(evidence.spans["kind"][evidence.spans["lane"] == 1])}
    for kind in sorted(kinds - {Kind.SEND, Kind.BARRIER}):
        rows = evidence.rows(*((Kind.SEND, Kind.RECV) if kind == Kind.RECV else (kind,)))
        if not len(rows):
            continue
        whole = evidence.gain(evidence.graph.durations_without(evidence.graph.nodes_of(rows)))
        gain = whole - evidence.explained_seconds(rows, before)
        if not evidence.worth(gain):
            continue
        word = "messages between stages" if kind == Kind.RECV else kind.word.replace("_", "-")
        busy = float(np.mean(evidence.one.comm_time))
        hidden = float(np.mean(np.array(evidence.one.comm_time) - np.array(evidence.one.exposed_comm)))
        yield evidence.make_finding(
            "exposed communication",
            f"{evidence.share(whole)} of the step is {word} that nothing hides: {seconds(whole)}, {len(rows)} "
            f"operations. "
            f"Ranks communicate for {seconds(busy)} per step on average, and compute during {seconds(hidden)} of it.",
            reason=_reason(evidence, rows),
            remedy=REMEDIES.get(kind, "Overlap it with computation, send fewer bytes, or use a faster link."),
            gain=gain, rows=rows, check=f"timeline.critical_path({{step}}).if_free(kind={kind.word!r})",
        )  # fmt: skip


def _reason(evidence: Evidence, rows: Iterable[int]) -> str:
    """Say how much of it ran while its own rank had nothing left to compute in the step's backward."""
    spans = evidence.spans
    back = np.isin(spans["kind"], (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)) & (spans["depth"] == 0)
    last = {
        int(rank): float(spans["end"][back & (spans["rank"] == rank)].max())
        for rank in np.unique(spans["rank"][back])
    }
    times = [
        (
            float(spans["end"][row] - spans["start"][row]),
            float(spans["start"][row]) >= last.get(int(spans["rank"][row]), np.inf),
        )
        for row in rows
    ]
    after = sum(time for time, late in times if late) / max(sum(time for time, _ in times), 1e-30)
    if after > 0.5:
        return f"{after:.0%} of its time begins when the backward has ended, so there is nothing to hide it behind."
    return "Ranks wait for it: what they compute next needs its result."

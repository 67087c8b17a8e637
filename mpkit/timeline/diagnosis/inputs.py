"""Inputs: loading of data, and copies between device and host, which a rank waits for.

replay   the step with the data there at once; the step without copies
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mpkit.common.units import bytes_text, seconds
from mpkit.timeline.diagnosis.evidence import Evidence
from mpkit.timeline.diagnosis.host import is_synchronizing
from mpkit.timeline.diagnosis.lateness import lost_time
from mpkit.timeline.findings import Finding
from mpkit.trace import Kind

__all__ = ["UNLIKE", "copies", "slow_loading"]

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
        f"{evidence.name_ranks(ranks)} {load} data for {seconds(float(times[list(ranks)].mean()))} a step before "
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

"""Stragglers: a rank that takes longer for its operations than those that do the same.

peers    the other ranks that run the same stage; where each stage has one rank, all others by FLOPs per second
replay   the step with that rank as fast as the median of its peers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.diagnosis.evidence import Evidence, Work
from mpkit.support.units import percent, seconds
from mpkit.timeline.findings.finding import Finding

__all__ = ["SLOWER", "expected", "stragglers"]

Array = npt.NDArray[Any]

SLOWER = 1.12
"""How many times as long as its peers a rank must take: cores of one machine differ by some percent from step to
step."""


def stragglers(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding for each rank that is slower than its peers."""
    work = evidence.work
    if not len(work.row):
        return
    usual = expected(work)
    for rank in np.unique(work.rank).tolist():
        mine = (work.rank == rank) & ~np.isnan(usual)
        took, should = float(work.took[mine].sum()), float(usual[mine].sum())
        if should <= 0 or took < SLOWER * should:
            continue
        factor = np.divide(usual, work.took, out=np.ones(len(usual)), where=work.took > 0)
        gain = evidence.gain(evidence.scaled(work.row[mine], np.minimum(factor[mine], 1.0)))
        if evidence.worth(gain):
            yield _finding(evidence, rank, took / should, gain, work.row[mine])


def expected(work: Work) -> Array:
    """Return the seconds that each action would take on the median of its peers, (n,); nan without peers."""
    usual = np.full(len(work.row), np.nan)
    for kind, stage in {*zip(work.kind.tolist(), work.stage.tolist(), strict=True)}:
        of_kind = work.kind == kind
        same = of_kind & (work.stage == stage)
        ranks = np.unique(work.rank[same]).tolist()
        if len(ranks) > 1:
            means = {rank: float(work.took[same & (work.rank == rank)].mean()) for rank in ranks}
            for rank in ranks:
                peers = [mean for each, mean in means.items() if each != rank]
                usual[same & (work.rank == rank)] = float(np.median(peers))
            continue
        paces = _paces(work, of_kind)
        for rank in ranks if len(paces) > 1 else []:
            others = [pace for each, pace in paces.items() if each != rank]
            own = same & (work.rank == rank)
            if rank in paces:
                usual[own] = work.flops[own] * float(np.median(others))
    return usual


def _paces(work: Work, of_kind: Array) -> dict[int, float]:
    """Return seconds per FLOP of each rank's actions of a kind, where all FLOPs are known."""
    if not (work.flops[of_kind] > 0).all():
        return {}
    ranks = np.unique(work.rank[of_kind]).tolist()
    sums = ((rank, of_kind & (work.rank == rank)) for rank in ranks)
    return {rank: float(work.took[own].sum() / work.flops[own].sum()) for rank, own in sums}


def _finding(evidence: Evidence, rank: int, ratio: float, gain: float, rows: Array) -> Finding:
    waiting = evidence.waiting
    for_it = np.delete(waiting.ranks[:, rank], rank)
    all_waits = np.delete(waiting.ranks.sum(axis=1) + waiting.under_way, rank)
    mean, total = float(for_it.mean()) if len(for_it) else 0.0, float(all_waits.sum())
    of_all = f", {percent(float(for_it.sum()) / total)} of their waiting" if total else ""
    arrives = ""
    if waiting.last[rank]:
        arrives = f"arrives last in {waiting.last[rank]} of {waiting.collectives} collectives: it "
    words = (
        f"Rank {rank} {arrives}takes {ratio:.2f} times as long as ranks that do the same, and the others wait "
        f"{seconds(mean)} a step for it{of_all}."
    )
    return evidence.finding(
        "straggler",
        words,
        reason="A collective begins when its last member has come, and a stage when it has its inputs: all go at the "
        "pace of the slowest.",
        remedy=f"Compare rank {rank}'s device with the others: clock rate, temperature, other programs on it, "
        f"its share "
        "of the batch, work that only this rank does.",
        gain=gain, rows=rows, ranks=(rank,), check=f"timeline.critical_path({{step}}).waiting.ranks[:, {rank}]",
    )  # fmt: skip

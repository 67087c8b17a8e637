"""Stragglers: a rank that takes longer for its operations than those that do the same, or that comes late.

peers    the other ranks that run the same stage; where each stage has one rank, all others by FLOPs per second
replay   the step with that rank as fast as the median of its peers
late     its operations are as fast, but its host or its start is late (`lateness`); late data is `data loading`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.common.units import seconds
from mpkit.timeline.diagnosis.evidence import Evidence, StepWork
from mpkit.timeline.diagnosis.lateness import (
    HOST,
    START,
    WORK,
    Late,
    arrives_last,
    late_ranks,
    lost_time,
    on_time,
    was_busy,
)
from mpkit.timeline.findings import Finding

__all__ = ["SLOWER", "expected_times", "stragglers"]

Array = npt.NDArray[Any]

SLOWER = 1.12
"""How many times as long as its peers a rank must take: cores of one machine differ by some percent from step to
step."""

AWAITED = 1.03
"""The same for a rank that comes last to at least half of the collectives, and for which the others wait."""


def stragglers(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding for each rank that is slower than its peers, or comes late to what they do together."""
    late_ones = list(late_ranks(evidence))
    yield from _slow(evidence, {late.rank for late in late_ones if late.cause == WORK})
    for late in late_ones:
        gain = evidence.gain(on_time(evidence, [late]))
        if late.cause in (HOST, START) and evidence.worth(gain):
            yield _late(evidence, late, gain)


def _slow(evidence: Evidence, awaited_ranks: set[int]) -> Iterable[Finding]:
    work = evidence.work
    if not len(work.row):
        return
    usual = expected_times(work)
    for rank in np.unique(work.rank).tolist():
        mine = (work.rank == rank) & ~np.isnan(usual)
        took, should = float(work.took[mine].sum()), float(usual[mine].sum())
        if should <= 0 or took < (AWAITED if rank in awaited_ranks else SLOWER) * should:
            continue
        factor = np.divide(usual, work.took, out=np.ones(len(usual)), where=work.took > 0)
        gain = evidence.gain(evidence.scale_durations(work.row[mine], np.minimum(factor[mine], 1.0)))
        if evidence.worth(gain):
            yield _slow_rank(evidence, rank, took / should, gain, work.row[mine])


def expected_times(work: StepWork) -> Array:
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


def _paces(work: StepWork, of_kind: Array) -> dict[int, float]:
    """Return seconds per FLOP of each rank's actions of a kind, where all FLOPs are known."""
    if not (work.flops[of_kind] > 0).all():
        return {}
    ranks = np.unique(work.rank[of_kind]).tolist()
    sums = ((rank, of_kind & (work.rank == rank)) for rank in ranks)
    return {rank: float(work.took[own].sum() / work.flops[own].sum()) for rank, own in sums}


def _slow_rank(evidence: Evidence, rank: int, ratio: float, gain: float, rows: Array) -> Finding:
    arrives = f"{last}: it " if (last := arrives_last(evidence, rank)) else ""
    words = (
        f"{evidence.name_ranks([rank])} {arrives}takes {ratio:.2f} times as long as ranks that do the same, and "
        f"{lost_time(evidence, rank)}."
    )
    remedy = (
        f"Compare rank {evidence.whole.rank_number(rank)}'s device with the others: clock rate, temperature, other "
        "programs on it, its share of the batch, work that only this rank does."
    )
    return _straggler(evidence, rank, words, remedy, gain, rows)


def _late(evidence: Evidence, late: Late, gain: float) -> Finding:
    if late.cause == HOST:
        beside = f"{seconds(late.seconds)} per step, and its peers for {seconds(late.usual)}"
        why = f"its host is late: its device stands still between operations for {beside}"
        remedy = "what only its host does (logging, evaluation, checkpoints), and other programs on it."
    else:
        until = (
            "is still at work on the step before"
            if was_busy(evidence, late)
            else "has been given nothing to do"
        )
        after = seconds(late.seconds - late.usual)
        why = f"it starts late: it begins the step {after} after its peers, and until then {until}"
        remedy = "what it does between two steps: loading, logging, evaluation, checkpoints."
    words = (
        f"{evidence.name_ranks([late.rank])} {arrives_last(evidence, late.rank)}, and "
        f"{lost_time(evidence, late.rank)}. Above all, {why}."
    )
    remedy = f"Compare rank {evidence.whole.rank_number(late.rank)}'s host with the others: {remedy}"
    rows = evidence.graph.row[late.nodes]
    return _straggler(evidence, late.rank, words, remedy, gain, rows[rows >= 0])


def _straggler(evidence: Evidence, rank: int, words: str, remedy: str, gain: float, rows: Array) -> Finding:
    return evidence.make_finding(
        "straggler", words,
        reason="A collective begins when its last member has come, and a stage when it has its inputs: all go at the "
        "pace of the slowest.",
        remedy=remedy, gain=gain, rows=rows, ranks=(rank,),
        check=f"timeline.critical_path({{step}}).waiting.ranks[:, {rank}]",
    )  # fmt: skip

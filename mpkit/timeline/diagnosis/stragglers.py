"""Stragglers: a rank, or ranks together, that take longer than those that do the same, or for which the others wait.

peers      the other ranks that run the same stages; where each stage has one rank, all others by time per FLOP
slow       it takes longer for its operations; replayed as fast as the median of its peers
late       its operations are as fast, but it came last to at least half of the collectives: its host leaves gaps, or
           it begins the step later; late data is `data loading`
together   a node, or a half of the ranks: where several are late none comes last, and without one of them the step is
           as long as before; so ranks are split at the largest difference between two of them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.common.units import percent, seconds
from mpkit.timeline.dependencies.graph import Node, StepGraph
from mpkit.timeline.diagnosis.evidence import WORTH, Evidence, StepWork
from mpkit.timeline.findings import Finding
from mpkit.trace import Kind, Lane

__all__ = ["SLOWER", "expected_times", "later_host_removed", "lost_time", "split_at_gap", "stragglers"]

Array = npt.NDArray[Any]

SLOWER = 1.12
"""How many times as long as its peers a rank must take: cores of one machine differ by some percent from step to
step."""

AWAITED = 1.03
"""The same for a rank that comes last to at least half of the collectives, and for which the others wait."""

HOST, START, DATA, WORK = "host", "start", "data", "slow"


class Late(NamedTuple):
    """Ranks that come late, for one reason.

    Attributes:
        ranks: which.
        others: those beside which they are late.
        cause: HOST, START, DATA or WORK: what they spend most time on beyond the others.
        seconds: (ranks,) how much each spends on that.
        usual: the median of the others.
        nodes: the pieces of the step on which they do.
    """

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    cause: str
    seconds: Array
    usual: float
    nodes: Array


def stragglers(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return findings for ranks that are slower than their peers, or come late to what they do together."""
    found, together = list[Finding](), set[int]()
    groups = [(evidence.gain(_on_time(evidence, each)), each) for each in _late_together(evidence)]
    for gain, group in sorted(groups, key=lambda each: -each[0]):
        if not together & {*group.ranks} and evidence.worth(gain):
            together |= {*group.ranks}
            found += _late_findings(evidence, group, gain)
    late_ones = [late for late in _late_ranks(evidence) if not together & {*late.ranks}]
    awaited = {late.ranks[0] for late in late_ones if late.cause == WORK}
    found += [each for each in _slow(evidence, awaited) if not together & {*each.ranks}]
    for late in late_ones:
        if late.cause in (HOST, START):
            found += _late_findings(evidence, late, evidence.gain(_on_time(evidence, late)))
    return found


def later_host_removed(evidence: Evidence) -> Array:
    """Return (n,) durations in which no rank's host leaves longer gaps than its peers', which is a straggler's."""
    late = [each for each in (*_late_together(evidence), *_late_ranks(evidence)) if each.cause == HOST]
    return _on_time(evidence, *late)


def _on_time(evidence: Evidence, *late: Late) -> Array:
    """Return (n,) durations in which late ranks spend no more on the cause of it than the others."""
    graph, factor = evidence.graph, np.ones(len(evidence.graph.took))
    for each in late:
        for rank, own in zip(each.ranks, each.seconds.tolist(), strict=True):
            nodes = each.nodes[graph.rank[each.nodes] == rank]
            factor[nodes] = np.minimum(factor[nodes], each.usual / own)
    return np.asarray(graph.took * factor)


def _late_findings(evidence: Evidence, late: Late, gain: float) -> list[Finding]:
    """Return the finding for a rank that comes late, or for ranks that do together."""
    rank, own = late.ranks[0], float(late.seconds.mean())
    rows = np.unique(evidence.graph.row[late.nodes])
    rows, several = rows[rows >= 0], len(late.ranks) > 1
    others = evidence.name_ranks(late.others)
    kinds = [Kind(kind).word.replace("_", " ") for kind in np.unique(evidence.spans["kind"][rows]).tolist()]
    alike = {evidence.stages[each] for each in (*late.ranks, *late.others)}
    still, are = ("are still", "have been") if several else ("is still", "has been")
    was_busy = _was_busy(evidence, late)
    return evidence.findings(
        "straggler", late.cause + " together" * several, gain=gain, rows=rows, ranks=late.ranks,
        rank=list(late.ranks) if several else rank, number=evidence.whole.rank_number(rank),
        arrives=_arrives_last(evidence, rank), lost=lost_time(evidence, rank), own=seconds(own),
        usual=seconds(late.usual), later=seconds(own - late.usual), others=f"{others[:1].lower()}{others[1:]}",
        ratio=f"{own / late.usual if late.usual else np.inf:.2f}", kinds=" and ".join(kinds),
        doing=", which do the same" if len(alike) == 1 else " for as many FLOPs",
        until=f"{still} at work on the step before" if was_busy else f"{are} given nothing to do",
    )  # fmt: skip


# ---- one rank ---------------------------------------------------------------------------------------------------


def _slow(evidence: Evidence, awaited_ranks: set[int]) -> list[Finding]:
    work, found = evidence.work, list[Finding]()
    usual = expected_times(work)
    for rank in np.unique(work.rank).tolist():
        mine = (work.rank == rank) & ~np.isnan(usual)
        took, should = float(work.took[mine].sum()), float(usual[mine].sum())
        if should <= 0 or took < (AWAITED if rank in awaited_ranks else SLOWER) * should:
            continue
        factor = np.divide(usual, work.took, out=np.ones(len(usual)), where=work.took > 0)
        last = _arrives_last(evidence, rank)
        found += evidence.findings(
            "straggler", "slow", gain=evidence.gain_scaled(work.row[mine], np.minimum(factor[mine], 1.0)),
            rows=work.row[mine], ranks=(rank,), rank=rank, number=evidence.whole.rank_number(rank),
            arrives=f"{last}: it " if last else "", ratio=f"{took / should:.2f}", lost=lost_time(evidence, rank),
        )  # fmt: skip
    return found


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


def _late_ranks(evidence: Evidence) -> Iterable[Late]:
    """Yield each rank for which the others wait, because it came last to at least half of the collectives."""
    waiting, step = evidence.waits, evidence.path.step_time
    everyone, stages = range(evidence.graph.world_size), evidence.stages
    nodes_of, spent = _by_cause(evidence)
    for rank in everyone:
        for_it = np.delete(waiting.ranks[:, rank], rank)
        often = 2 * waiting.last[rank] >= waiting.collectives > 0
        if not len(for_it) or not often or for_it.mean() < WORTH * step:
            continue
        peers = [each for each in everyone if each != rank and stages[each] == stages[rank]]
        # Where each stage has one rank, they begin one after the other, and work differs from stage to stage.
        causes = nodes_of if peers else (HOST, DATA)
        beside = peers or [each for each in everyone if each != rank]
        usual = {cause: float(np.median(spent[cause][beside])) for cause in causes}
        cause = max(usual, key=lambda each: spent[each][rank] - usual[each])
        own = spent[cause][rank]
        if own - usual[cause] >= WORTH * step:
            nodes = np.flatnonzero(nodes_of[cause] & (evidence.graph.rank == rank))
            yield Late((rank,), tuple(beside), cause, np.array([own]), usual[cause], nodes)


def _by_cause(evidence: Evidence) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return, by what a rank can be late with, (n,) which pieces of the step are that, and (ranks,) seconds of it."""
    graph = evidence.graph
    lane = np.where(graph.row >= 0, evidence.spans["lane"][graph.row], Lane.NONE)
    work = graph.kind == Node.WORK
    nodes_of = {
        HOST: graph.kind == Node.GAP, START: graph.kind == Node.BEFORE,
        DATA: work & (lane == Lane.DATA), WORK: work & (lane != Lane.DATA),
    }  # fmt: skip
    return nodes_of, {cause: _seconds_of(graph, nodes) for cause, nodes in nodes_of.items()}


def _seconds_of(graph: StepGraph, nodes: Array) -> Array:
    """Return (ranks,) seconds of these pieces."""
    return np.bincount(graph.rank[nodes], graph.took[nodes], minlength=graph.world_size)


def _arrives_last(evidence: Evidence, rank: int) -> str:
    """Say to how many collectives a rank came last; "" if to none."""
    last, of = evidence.waits.last[rank], evidence.waits.collectives
    return f"arrives last in {last} of {of} collectives" if last else ""


def lost_time(evidence: Evidence, rank: int) -> str:
    """Say what the others lose until a rank comes."""
    waiting = evidence.waits
    for_it = np.delete(waiting.ranks[:, rank], rank)
    total = float(np.delete(waiting.ranks.sum(axis=1) + waiting.under_way, rank).sum())
    of_all = f", {percent(float(for_it.sum()) / total)} of their waiting" if total else ""
    return f"the others wait {seconds(float(for_it.mean()))} per step for it{of_all}"


def _was_busy(evidence: Evidence, late: Late) -> bool:
    """Return whether ranks that begin their step late were at work until then, on the step before."""
    spans, begin = evidence.whole.spans, evidence.graph.begin
    own = spans[np.isin(spans["rank"], late.ranks) & (spans["lane"] == Lane.COMPUTE) & (spans["depth"] == 0)]
    own = own[own["step"] != evidence.step]
    busy = np.minimum(own["end"], begin + late.seconds.min()) - np.maximum(own["start"], begin)
    return bool(np.maximum(busy, 0.0).sum() > late.seconds.sum() / 2)


# ---- ranks together ---------------------------------------------------------------------------------------------


def _late_together(evidence: Evidence) -> Iterable[Late]:
    """Yield two or more ranks that spend about equally more on something than others that do the same."""
    step, stages = evidence.path.step_time, evidence.stages
    nodes_of, spent = _by_cause(evidence)
    pools = [
        [rank for rank, own in enumerate(stages) if own == these]
        for these in sorted({*stages}, key=lambda own: stages.index(own))
    ]
    everyone = list(range(len(stages)))
    tried = [(cause, pool, spent[cause]) for pool in pools for cause in (HOST, START, WORK)]
    if len(pools) > 1 and (paced := _work_by_pace(evidence)) is not None:
        tried += [(HOST, everyone, spent[HOST]), (WORK, everyone, paced)]
    for cause, pool, times in tried:
        on_time, late = split_at_gap(times[pool], WORTH * step)
        ranks, others = ([pool[place] for place in these.tolist()] for these in (late, on_time))
        chosen = nodes_of[cause] & np.isin(evidence.graph.rank, pool)
        if cause == WORK and len(ranks) > 1 and times is spent[WORK]:
            chosen, times = _slower_kinds(evidence, chosen, ranks, others)
        usual = float(np.median(times[others]))
        if len(ranks) < 2 or (cause == WORK and times[ranks].min() < SLOWER * usual):
            continue
        nodes = np.flatnonzero(chosen & np.isin(evidence.graph.rank, ranks))
        yield Late(tuple(sorted(ranks)), tuple(sorted(others)), cause, times[sorted(ranks)], usual, nodes)


def _slower_kinds(
    evidence: Evidence, work: Array, ranks: Sequence[int], others: Sequence[int]
) -> tuple[Array, Array]:
    """Return (n,) which pieces of work are of kinds for which ranks take longer than others, and (ranks,) seconds."""
    graph = evidence.graph
    kinds = np.where(graph.row >= 0, evidence.spans["kind"][graph.row], -1)
    chosen = np.zeros(len(work), bool)
    for kind in np.unique(kinds[work]).tolist():
        these = work & (kinds == kind)
        took = _seconds_of(graph, these)
        if took[ranks].mean() >= AWAITED * took[others].mean():
            chosen |= these
    return chosen, _seconds_of(graph, chosen)


def split_at_gap(times: Array, least: float) -> tuple[Array, Array]:
    """Return the places of the shorter times and of the longer ones; no longer ones where no gap is between them.

    The gap is the largest difference between two times that follow each other, is at least so long, and exceeds what
    times differ on either side of it.

    >>> split_at_gap(np.array([1.0, 6.1, 1.2, 6.0]), 0.1)
    (array([0, 2]), array([3, 1]))
    """
    order = np.argsort(times, kind="stable")
    ordered = times[order]
    gaps = np.diff(ordered)
    at = int(np.argmax(gaps)) if len(gaps) else 0
    spread = max(
        float(np.ptp(part)) for part in (ordered[: at + 1], ordered[at + 1 :] if len(gaps) else ordered)
    )
    if not len(gaps) or gaps[at] < max(least, spread, 1e-30):
        return order, order[:0]
    return order[: at + 1], order[at + 1 :]


def _work_by_pace(evidence: Evidence) -> Array | None:
    """Return (ranks,) seconds that each rank would work if all had the mean FLOPs; None where not all are known."""
    work, ranks = evidence.work, evidence.graph.world_size
    staged = work.stage >= 0
    flops = np.bincount(work.rank[staged], work.flops[staged], minlength=ranks)
    if not (work.flops[staged] > 0).all() or not (flops > 0).all():
        return None
    return np.bincount(work.rank[staged], work.took[staged], minlength=ranks) / flops * float(flops.mean())

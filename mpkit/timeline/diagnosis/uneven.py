"""Unequal ranks: stragglers; stages of unlike size; and a bubble of the schedule that more micro-batches would shrink.

straggler   ranks that take longer than those that do the same, or come later to what all do
            pool     ranks that run the same stages; where stages differ, also all ranks, by what they would take for
                     equal FLOPs
            spent    each rank's seconds on operations (slow), on gaps that its host leaves (host), before it is in the
                     step (start)
            late     those beyond the largest difference between two of the pool: a rank, a node, a half of all. The
                     step is played again with what the median of the others spends for all of them: if several are
                     late none of them comes last, and without one of them the step is as long as before
imbalance   the step played again with each stage's actions as long as the mean of all stages; where FLOPs are known,
            with equal FLOPs at each rank's own pace, so that a slow rank is no large stage
bubble      the schedule played with equal stages, with as many micro-batches and with more
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.units import percent, seconds
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import NAIVE, ONE_F_ONE_B, bubble_in_theory
from mpkit.timeline.dependencies.graph import Node
from mpkit.timeline.diagnosis.evidence import WORTH, Evidence
from mpkit.timeline.findings import Finding
from mpkit.timeline.metrics import stage_times
from mpkit.timeline.simulation import simulate
from mpkit.trace import Kind, Lane

SLOWER = 1.12
"""How many times as long as its peers a rank must take: cores of one machine differ by some percent from step to
step."""

AWAITED = 1.03
"""The same for ranks of which one comes last to at least half of the collectives, as a rank that is late alone does."""

SLOW, HOST, START = "slow", "host", "start"


class Late(NamedTuple):
    """Ranks that come late, for one reason."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]  # those that they are compared with
    cause: str  # SLOW, HOST or START
    seconds: Array  # (ranks,) that each spends on the cause
    usual: float  # the median of the others' seconds
    nodes: Array  # the pieces of the step on which they spend them


def stragglers(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return findings for ranks that are late; each rank is in the one that costs most."""
    found, named = list[Finding](), set[int]()
    gains = [(evidence.gain(_on_time(evidence, each)), each) for each in _late_ranks(evidence)]
    for gain, late in sorted(gains, key=lambda each: -each[0]):
        if not named & {*late.ranks} and evidence.worth(gain):
            named |= {*late.ranks}
            found += _findings(evidence, late, gain)
    return found


def later_host_removed(evidence: Evidence) -> Array:
    """Return (n,) durations in which no rank's host leaves longer gaps than its peers'; those are a straggler's."""
    return _on_time(evidence, *(each for each in _late_ranks(evidence) if each.cause == HOST))


def _on_time(evidence: Evidence, *late: Late) -> Array:
    """Return (n,) durations in which late ranks spend no more on the cause of it than the others."""
    graph, factor = evidence.graph, np.ones(len(evidence.graph.took))
    for each in late:
        for rank, own in zip(each.ranks, each.seconds.tolist(), strict=True):
            nodes = each.nodes[graph.rank[each.nodes] == rank]
            factor[nodes] = np.minimum(factor[nodes], each.usual / own)
    return np.asarray(graph.took * factor)


# ---- who is late


def _late_ranks(evidence: Evidence) -> list[Late]:
    """Return the late ranks of each pool, by cause; a rank may be late for several causes."""
    graph, stages = evidence.graph, evidence.stages
    lane = np.where(graph.row >= 0, evidence.spans["lane"][graph.row], Lane.NONE)
    nodes_of = {
        SLOW: (graph.kind == Node.WORK) & (lane != Lane.DATA),
        HOST: graph.kind == Node.GAP,
        START: graph.kind == Node.BEFORE,
    }
    spent = {
        cause: np.bincount(graph.rank[nodes], graph.took[nodes], minlength=graph.world_size)
        for cause, nodes in nodes_of.items()
    }
    pools = [[rank for rank, own in enumerate(stages) if own == these] for these in dict.fromkeys(stages)]
    tried = [(cause, pool, spent[cause]) for pool in pools for cause in nodes_of]
    if len(pools) > 1 and (paced := _work_by_pace(evidence)) is not None:
        everyone = [*range(graph.world_size)]
        tried += [(HOST, everyone, spent[HOST]), (SLOW, everyone, paced)]
    found, least = [], WORTH * evidence.path.step_time
    for cause, pool, times in tried:
        on_time, late = split_at_gap(times[pool], least)
        while len(late):  # of those that are left, some may be late by less
            ranks, others = (tuple(sorted(pool[place] for place in these)) for these in (late, on_time))
            own, usual = times[list(ranks)], float(np.median(times[list(others)]))
            last = 2 * int(evidence.waits.last[ranks[0]]) >= evidence.waits.collectives > 0
            slower = own.min() >= (AWAITED if last else SLOWER) * usual
            if slower if cause == SLOW else last or len(ranks) > 1:
                nodes = np.flatnonzero(nodes_of[cause] & np.isin(graph.rank, ranks))
                found.append(Late(ranks, others, cause, own, usual, nodes))
            pool = list(others)
            on_time, late = split_at_gap(times[pool], least)
    return found


def split_at_gap(times: Array, least: float) -> tuple[Array, Array]:
    """Return the places of the shorter times and of the longer ones; no longer ones if no gap is between them.

    The gap is the largest difference between two times that follow each other, at least `least` and the spread of the
    times on either side of it.

    >>> split_at_gap(np.array([1.0, 6.1, 1.2, 6.0]), 0.1)
    (array([0, 2]), array([3, 1]))
    """
    order = np.argsort(times, kind="stable")
    gaps = np.diff(times[order])
    at = int(np.argmax(gaps)) + 1 if len(gaps) else len(order)
    spread = max((float(np.ptp(times[part])) for part in (order[:at], order[at:]) if len(part)), default=0.0)
    apart = len(gaps) > 0 and gaps[at - 1] >= max(least, spread, 1e-30)
    return (order[:at], order[at:]) if apart else (order, order[:0])


def _work_by_pace(evidence: Evidence) -> Array | None:
    """Return (ranks,) seconds that each rank would work if all had the mean FLOPs; None if not all are known."""
    work, ranks = evidence.work, evidence.graph.world_size
    staged = work.stage >= 0
    flops = np.bincount(work.rank[staged], work.flops[staged], minlength=ranks)
    if not (work.flops[staged] > 0).all() or not (flops > 0).all():
        return None
    return np.bincount(work.rank[staged], work.took[staged], minlength=ranks) / flops * float(flops.mean())


# ---- in words


def _findings(evidence: Evidence, late: Late, gain: float) -> list[Finding]:
    """Return the finding for late ranks: for one rank with what the others lose, for several with who is on time."""
    rank, own, several = late.ranks[0], float(late.seconds.mean()), len(late.ranks) > 1
    rows = np.unique(evidence.graph.row[late.nodes])
    rows = rows[rows >= 0]
    last, others = int(evidence.waits.last[rank]), evidence.name_ranks(late.others)
    arrives = f"arrives last in {last} of {evidence.waits.collectives} collectives"
    if late.cause == SLOW:
        arrives = f"{arrives}: it " if last else ""
    kinds = [Kind(kind).word.replace("_", " ") for kind in np.unique(evidence.spans["kind"][rows]).tolist()]
    alike = {evidence.stages[each] for each in (*late.ranks, *late.others)}
    still, are = ("are still", "have been") if several else ("is still", "has been")
    return evidence.findings(
        "straggler", late.cause + " together" * several, gain=gain, rows=rows, ranks=late.ranks,
        rank=list(late.ranks) if several else rank, number=evidence.whole.rank_number(rank),
        arrives=arrives, lost=lost_time(evidence, rank), own=seconds(own),
        usual=seconds(late.usual), later=seconds(own - late.usual), others=f"{others[:1].lower()}{others[1:]}",
        ratio=f"{own / late.usual if late.usual else np.inf:.2f}", kinds=" and ".join(kinds),
        doing=", which do the same" if len(alike) == 1 else " for as many FLOPs",
        until=f"{still} at work on the step before" if _was_busy(evidence, late) else f"{are} given nothing to do",
    )  # fmt: skip


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


UNEVEN = 1.1
"""How many times the mean the largest stage must be; embeddings and heads alone make a few percent."""

STAGED = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE)

FILLED = 4
"""Micro-batches per stage that are tried: with 4 p of them, 1F1B's bubble (p-1)/(m+p-1) is below 20 %."""


def imbalance(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding if some rank's stages take longer than the others'."""
    work = evidence.work
    staged = np.isin(work.kind, STAGED) & (work.stage >= 0)
    if len(np.unique(work.stage[staged])) < 2:
        return []
    by_flops = bool((work.flops[staged] > 0).all())
    size = work.flops if by_flops else work.took
    factor = np.ones(len(work.row))
    for kind in np.unique(work.kind[staged]).tolist():
        of_kind = staged & (work.kind == kind)
        stages = np.unique(work.stage[of_kind]).tolist()
        means = {stage: float(size[of_kind & (work.stage == stage)].mean()) for stage in stages}
        for stage, mean in means.items():
            factor[of_kind & (work.stage == stage)] = np.mean(list(means.values())) / mean if mean else 1.0
    there, rank_of = np.unique(work.rank[staged], return_inverse=True)
    total, seconds_of = np.bincount(rank_of, size[staged]), np.bincount(rank_of, work.took[staged])
    at, rows = int(np.argmax(total)), work.row[staged]
    largest, over = int(there[at]), float(total[at] / total.mean())
    if over < UNEVEN:
        return []
    stages = sorted(set(work.stage[staged & (work.rank == largest)].tolist()))
    return evidence.findings(
        "unbalanced stages", gain=evidence.gain_scaled(rows, factor[staged]), rows=rows, ranks=(largest,),
        stages=f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}", over=f"{over:.2f}",
        unit="FLOPs" if by_flops else "time", works=evidence.share(float(seconds_of[at])),
        others=evidence.share(float(np.delete(seconds_of, at).mean())),
    )  # fmt: skip


def bubble(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding if the schedule itself leaves ranks idle, and more micro-batches would not."""
    plan = evidence.plan
    if plan is None or plan.pp < 2 or not isinstance(plan.schedule, str):
        return []
    p, m, v = plan.pp, plan.microbatches, plan.virtual_stages
    try:
        theory = bubble_in_theory(plan.schedule, p, m, v, recompute=plan.recompute == "full")
        times = stage_times(evidence.one)
    # A schedule of somebody's own, of which no paper says more; a stage that is missing.
    except (
        KeyError,
        ValueError,
    ):
        return []
    batch = int(evidence.whole.meta.get("batch_size") or 0)
    # A multiple of the present micro-batches, as many as the batch has samples for at most.
    samples = batch // (plan.dp * m) if batch else FILLED * p
    more = m * max(1, min(-(-FILLED * p // m), samples))
    if more <= m:
        return []
    mean: dict[str, Any] = {name: float(np.mean(value)) for name, value in times.items()}
    hop = mean.pop("hop")
    shape = Plan(pp=p, schedule=plan.schedule, microbatches=m, virtual_stages=v, recompute=plan.recompute)
    even = simulate(shape, **mean, hop=hop)
    parts: dict[str, Any] = {name: value * m / more for name, value in mean.items()}
    # One after the other, more would be no better.
    schedule = ONE_F_ONE_B if plan.schedule == NAIVE else plan.schedule
    then = simulate(replace(shape, schedule=schedule, microbatches=more), **parts, hop=hop).step_time
    by_theory = "" if theory is None else f"{percent(float(theory))} by the theory of "
    expects = f"{by_theory}{plan.schedule}"
    return evidence.findings(
        "schedule's bubble", gain=even.step_time - then, by="simulation", ranks=range(evidence.graph.world_size),
        idle_share=percent(even.bubble), expects=expects, p=p, m=m, es="es" * (m > 1), more=more,
        of=f" of {schedule}" * (schedule != plan.schedule), smaller=f"{more / m:g}",
    )  # fmt: skip

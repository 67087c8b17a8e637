"""Lateness: a rank that others wait for although its kernels are as fast as theirs.

waits    what the others lose until it comes, and to how many collectives it came last
causes   seconds that it spends more than the median of its peers: on nothing between its operations (its host), before
         it begins the step, on loading data, on its operations
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.common.units import percent, seconds
from mpkit.timeline.dependencies.graph import Node
from mpkit.timeline.diagnosis.evidence import WORTH, Evidence
from mpkit.trace import Lane

__all__ = ["HOST", "START", "WORK", "Late", "arrives_last", "late_ranks", "lost_time", "on_time", "was_busy"]

Array = npt.NDArray[np.int64]

HOST, START, DATA, WORK = "host", "start", "data", "kernels"


class Late(NamedTuple):
    """A rank that comes late.

    Attributes:
        rank: which.
        cause: HOST, START, DATA or WORK: what it spends most time on beyond its peers.
        seconds, usual: how much it spends on that, and the median of its peers.
        nodes: the pieces of the step on which it does.
    """

    rank: int
    cause: str
    seconds: float
    usual: float
    nodes: Array


def late_ranks(evidence: Evidence) -> Iterable[Late]:
    """Yield each rank for which the others wait, because it came last to at least half of the collectives."""
    graph, waiting, step = evidence.graph, evidence.waits, evidence.path.step_time
    everyone = range(graph.world_size)
    lane = np.where(graph.row >= 0, evidence.spans["lane"][graph.row], Lane.NONE)
    work = graph.kind == Node.WORK
    of_cause = {
        HOST: graph.kind == Node.GAP, START: graph.kind == Node.BEFORE,
        DATA: work & (lane == Lane.DATA), WORK: work & (lane != Lane.DATA),
    }  # fmt: skip
    spent = {
        cause: np.bincount(graph.rank[nodes], graph.took[nodes], minlength=len(everyone))
        for cause, nodes in of_cause.items()
    }
    for rank in everyone:
        for_it = np.delete(waiting.ranks[:, rank], rank)
        often = 2 * waiting.last[rank] >= waiting.collectives > 0
        if not len(for_it) or not often or for_it.mean() < WORTH * step:
            continue
        peers = [
            each for each in everyone if each != rank and _stages(evidence, each) == _stages(evidence, rank)
        ]
        # Where each stage has one rank, they begin one after the other, and work differs from stage to stage.
        causes = of_cause if peers else (HOST, DATA)
        beside = peers or [each for each in everyone if each != rank]
        usual = {cause: float(np.median(spent[cause][beside])) for cause in causes}
        cause = max(usual, key=lambda each: spent[each][rank] - usual[each])
        own = float(spent[cause][rank])
        if own - usual[cause] >= WORTH * step:
            yield Late(rank, cause, own, usual[cause], np.flatnonzero(of_cause[cause] & (graph.rank == rank)))


def _stages(evidence: Evidence, rank: int) -> set[int]:
    work = evidence.work
    return set(work.stage[work.rank == rank].tolist())


def on_time(evidence: Evidence, late: Iterable[Late]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return (n,) durations in which late ranks spend no more on the cause of it than their peers."""
    took = evidence.graph.took.copy()
    for each in late:
        took[each.nodes] *= each.usual / each.seconds
    return took


def arrives_last(evidence: Evidence, rank: int) -> str:
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


def was_busy(evidence: Evidence, late: Late) -> bool:
    """Return whether a rank that begins its step late was at work until then, on the step before."""
    spans, begin = evidence.whole.spans, evidence.graph.begin
    own = spans[(spans["rank"] == late.rank) & (spans["lane"] == Lane.COMPUTE) & (spans["depth"] == 0)]
    own = own[own["step"] != evidence.step]
    busy = np.minimum(own["end"], begin + late.seconds) - np.maximum(own["start"], begin)
    return bool(np.maximum(busy, 0.0).sum() > late.seconds / 2)

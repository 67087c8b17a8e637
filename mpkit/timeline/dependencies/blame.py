"""Whose fault waiting is: each wait is charged to the rank that came last, until it came; after that to the link.

waiting      seconds that each rank waits for each other one
under way    seconds that each rank waits while its communication is on the link
arrivals     which rank came last to each collective
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.dependencies.graph import Node, StepGraph
from mpkit.trace import Kind

__all__ = ["StepWaiting", "waiting_of"]

Array = npt.NDArray[Any]
MESSAGES = (Kind.SEND, Kind.RECV)


@dataclass(frozen=True)
class StepWaiting:
    """The waiting of one step.

    Attributes:
        ranks: (ranks, ranks) seconds: in row r what rank r waits for each rank that had not come yet.
        under_way: (ranks,) seconds that a rank waits for communication that has begun.
        last: (ranks,) to how many collectives each rank came last.
        collectives: how many collectives have a rank that came last.
    """

    ranks: Array
    under_way: Array
    last: Array
    collectives: int


def waiting_of(graph: StepGraph, spans: Array) -> StepWaiting:
    """Return who waits for whom in a step.

    Args:
        graph: the step.
        spans: (n,) of `SPAN`, those of the step.
    """
    n = graph.world_size
    waits, under_way, last = np.zeros((n, n)), np.zeros(n), np.zeros(n, int)
    close = 1e-9 * graph.step_time
    for number in np.flatnonzero(graph.kind == Node.WAIT).tolist():
        rank, needs = int(graph.rank[number]), graph.needs[number]
        causes = [need for need in needs if graph.kind[need] == Node.TRANSFER]
        if not causes:
            continue
        own = max((graph.ends[need] for need in needs if need not in causes), default=0.0)
        end, ready = float(graph.ends[number]), graph.ready_of.get(causes[0])
        came = min(max(float(graph.ends[ready]) if ready is not None else own, own), end)
        late = int(graph.rank[ready]) if ready is not None else rank
        if late != rank and came > own:
            waits[rank, late] += came - own
        under_way[rank] += end - (came if late != rank else own)
    counted = 0
    for ready in sorted(set(graph.ready_of.values())):
        if Kind(int(spans["kind"][graph.row[ready]])) in MESSAGES:
            continue
        times = sorted(graph.ends[need] for need in graph.needs[ready])
        if len(times) > 1 and times[-1] - times[-2] > close:
            counted += 1
            last[graph.rank[ready]] += 1
    return StepWaiting(waits, under_way, last, counted)

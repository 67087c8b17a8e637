"""Why a bubble is what it is, in one sentence: theory beside the causes of the time in which ranks were idle."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpkit.common.units import percent
from mpkit.plan.mesh import axis_of
from mpkit.timeline import metrics
from mpkit.timeline.idleness import CAUSES, SCHEDULED, idle_by_cause, jitter_of
from mpkit.timeline.traffic import members_of
from mpkit.trace import Kind, Lane

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


APART = 0.02
"""How far a bubble may be from theory without a word."""

JITTER = "jitter (equal actions took unlike times)"
"""The part of the imbalance that is none of the plan's: on CPU ranks, of cores that they share."""

LEAST = 0.005
"""The least share of a step that is named."""


def bubble_words(theory: float, timeline: Timeline | None = None) -> str:
    """Return the bubble according to the formula and, where the measured one is another, what that consists of.

    Args:
        theory: the bubble if all stages took equally long and communication no time.
        timeline: the run's; its last complete step counts, as for `Timeline.bubble`; None: there is none yet.

    >>> import mpkit as mk
    >>> plan = mk.Plan.gpipe(3, 4)
    >>> bubble_words(1 / 3, mk.simulate(plan))
    'Bubble in theory, were all stages equal: 33.3 %.'
    >>> bubble_words(1 / 3, mk.simulate(plan, forward=[1, 1, 2], hop=0.25))
    'Bubble in theory, were all stages equal: 33.3 %. The 42.0 % here: 28.0 % schedule, 9.7 % imbalance,
    4.3 % communication (pp).'
    """
    words = f"Bubble in theory, were all stages equal: {percent(theory)}."
    if timeline is None or not len(metrics.work(timeline.spans)) or abs(timeline.bubble - theory) < APART:
        return words
    whole = timeline.step_time
    mean = idle_by_cause(timeline).mean(axis=0) / whole if whole else np.zeros(len(CAUSES))
    shares: dict[str, float] = defaultdict(float)
    for cause, share in zip(CAUSES, mean.tolist(), strict=True):
        shares["schedule" if cause in SCHEDULED else cause] += share
    if shares["imbalance"] >= LEAST and timeline.clock == "virtual":
        shares[JITTER] = min(jitter_of(timeline) / whole, shares["imbalance"])
        shares["imbalance"] -= shares[JITTER]
    axes = _axes(timeline) if shares["communication"] >= LEAST else ""
    named = [
        f"{percent(share)} {cause}{f' ({axes})' if cause == 'communication' and axes else ''}"
        for cause, share in sorted(shares.items(), key=lambda each: (each[0] != "schedule", -each[1]))
        if share >= LEAST
    ]
    return f"{words} The {percent(timeline.bubble)} here: {', '.join(named)}."


def _axes(timeline: Timeline) -> str:
    """Return the axes whose communication nothing hides, that which takes longest first, each a tenth of it or more.

    A wait inside an action exposes the communication that it waits for, and no other.
    """
    one = timeline.last_step
    spans = one.spans
    calls = np.flatnonzero(spans["lane"] == Lane.COMM)
    axis_of_row = dict(zip(calls.tolist(), (_axis(one, spans[row]) for row in calls), strict=True))
    axes = np.array([axis_of_row.get(row, "") for row in range(len(spans))])
    compute = spans["lane"] == Lane.COMPUTE
    causes = np.where(spans["cause"] >= 0, axes[spans["cause"]], "") if len(spans) else axes
    awaits_other = (spans["kind"] == Kind.WAIT) & (causes != "")
    exposed: dict[str, float] = defaultdict(float)
    for rank in np.unique(spans["rank"][calls]).tolist():
        mine = spans["rank"] == rank
        for axis in {axis_of_row[row] for row in calls[mine[calls]].tolist()}:
            comm = spans[mine & (spans["lane"] == Lane.COMM) & (axes == axis)]
            exposed[axis] += metrics.exposed_seconds(
                comm, spans[mine & compute & ~(awaits_other & (causes != axis))]
            )
    total = sum(exposed.values())
    ordered = sorted(exposed.items(), key=lambda each: -each[1])
    return ", ".join(axis for axis, time in ordered if axis and time >= 0.1 * total)


def _axis(timeline: Timeline, call: npt.NDArray[Any]) -> str:
    kind, rank, group, peer = (int(call[name]) for name in ("kind", "rank", "group", "peer"))
    members = members_of(timeline, kind, rank, group, peer)
    return axis_of(timeline.mesh, members, timeline.meta, exchange=kind == Kind.ALL_TO_ALL)

"""Why a rank is idle: the time of a step in which it does not work, split by cause; and the bubble beside theory.

    data            how much would vanish if every rank had its share of the batch immediately
    imbalance       how much of the rest would vanish if all actions of a kind took their mean time on every rank
    communication   how much of the rest would vanish if communication took no time
    warm-up         of what is left, the time before a rank's first action: nothing has arrived yet
    dependency      between its actions: another rank has not yet computed what it waits for
    cool-down       after its last action: other ranks still work
    other           no known cause: a copy, or time between ops on the measured clock

More workers change the data, a better cut the imbalance, a faster link the communication, and a different schedule
warm-up, dependency and cool-down.

A step is a graph (`mpkit.timeline.dependencies`) that is played again: each of the first three causes is charged what
the step saves without it. The order of the work and who waits for whom do not change.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.units import percent
from mpkit.plan.mesh import axis_of
from mpkit.timeline import metrics
from mpkit.timeline.dependencies.graph import Node, StepGraph, graph_of, lies_within
from mpkit.timeline.traffic import members_of
from mpkit.trace import Kind, Lane

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


CAUSES = ("warm-up", "dependency", "imbalance", "communication", "data", "cool-down", "other")
WARM_UP, DEPENDENCY, IMBALANCE, COMMUNICATION, DATA, COOL_DOWN, OTHER = range(len(CAUSES))
SCHEDULED = ("warm-up", "dependency", "cool-down")
"""The causes that a pipeline's schedule decides, of which theory speaks."""

CHARGED = (DATA, IMBALANCE, COMMUNICATION)


def idle_by_cause(timeline: Timeline) -> Array:
    """Return seconds by rank and cause, (ranks, causes), for the last complete step.

    The sum over causes is `timeline.idle`.

    >>> import mpkit as mk
    >>> t = mk.simulate(mk.Plan.gpipe(3, 4), forward=[1, 1, 2], hop=0.25)
    >>> for rank, seconds in enumerate(idle_by_cause(t).round(2).tolist()):
    ...     print(rank, {cause: s for cause, s in zip(CAUSES, seconds) if s})
    0 {'dependency': 6.67, 'imbalance': 3.33, 'communication': 1.0}
    1 {'warm-up': 1.33, 'dependency': 3.33, 'imbalance': 3.33, 'communication': 1.0, 'cool-down': 2.0}
    2 {'warm-up': 2.0, 'communication': 1.0, 'cool-down': 4.0}
    """
    one = timeline.last_step
    return causes_of(graph_of(one.spans, one.world_size, one.clock), one.spans)


def parts_of_step(timeline: Timeline) -> dict[str, float]:
    """Return seconds per rank of work, and of idle time by cause, averaged over ranks, the longest first.

    They add up to the last complete step.

    >>> import mpkit as mk
    >>> parts_of_step(mk.simulate(mk.Plan.gpipe(4, 8)))
    {'work': 24.0, 'idle: dependency': 4.5, 'idle: cool-down': 3.0, 'idle: warm-up': 1.5}
    """
    one = timeline.last_step
    idle = idle_by_cause(one).mean(axis=0).tolist()
    parts = {"work": sum(one.busy) / one.world_size}
    parts |= {f"idle: {cause}": seconds for cause, seconds in zip(CAUSES, idle, strict=True) if seconds > 0}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def jitter_of(timeline: Timeline) -> float:
    """Return the seconds of idle time per rank, averaged, that would vanish if equal actions took equally long.

    Equal are actions of one kind and stage on one rank in the last complete step. On CPU ranks that share cores their
    times differ by what the caches and the clock of the core allow, and the first of them touch memory for the others.
    The rest of the imbalance is real: stages or ranks that have more to do.

    >>> import mpkit as mk
    >>> jitter_of(mk.simulate(mk.Plan.gpipe(3, 4), forward=[1, 1, 2]))
    0.0
    """
    one = timeline.last_step
    step = _IdleStep(graph_of(one.spans, one.world_size, one.clock), one.spans)
    # Each action takes the mean of its kind and stage on its rank.
    even = step.with_means(step.graph.took.copy(), of_ranks=False)
    idle = [float(step.split(took).sum()) for took in (step.graph.took, even)]
    return max(idle[0] - idle[1], 0.0) / one.world_size


def causes_of(graph: StepGraph, spans: Array) -> Array:
    """Return `idle_by_cause` of a step that is a graph already, of these spans."""
    step = _IdleStep(graph, spans)
    causes = step.split(step.graph.took)
    if step.loads.any():
        _charge(causes, DATA, step.split(step.loaded_at_once))
    # The slowest rank would wait longer if all were equal: it keeps its times.
    equal = _charge(causes, IMBALANCE, step.split(step.equal))
    transfers = graph.kind == Node.TRANSFER
    at_once = [step.split(np.where(transfers, 0.0, took)) for took in (step.loaded_at_once, step.equal)]
    _charge(causes, COMMUNICATION, np.where(equal[:, None], at_once[1], at_once[0]))
    return causes


def _charge(causes: Array, cause: int, without: Array) -> Array:
    """Charge to a cause of CHARGED what ranks save without it, in place; return (ranks,) whether each saves something.

    `causes` has the seconds so far, (ranks, causes); `without` those of the step played without this cause and those
    that were charged before.
    """
    earlier = CHARGED[: CHARGED.index(cause)]
    before = causes[:, earlier]
    saved = causes.sum(axis=1) - before.sum(axis=1) - without.sum(axis=1)
    less = saved > 1e-12 * max(float(causes.sum()), 1e-30)
    causes[less] = without[less]
    causes[np.ix_(less, earlier)] += before[less]
    causes[less, cause] += saved[less]
    return np.asarray(less)


@dataclass
class _IdleStep:
    """A step's graph of n pieces, and which of these are work."""

    graph: StepGraph
    spans: Array  # of the step, one row for each of `graph.row`

    @cached_property
    def work(self) -> Array:
        """(n,) whether a piece is a part of an action, or a copy within one."""
        spans = self.spans
        actions = (spans["lane"] == Lane.COMPUTE) & (spans["depth"] == 0) & (spans["kind"] != Kind.WAIT)
        return np.asarray((self.graph.kind == Node.WORK) & self._with_copies(actions))

    @cached_property
    def loads(self) -> Array:
        """(n,) whether a piece loads the rank's share of the batch, or is a copy within that."""
        return np.asarray((self.graph.kind == Node.WORK) & self._with_copies(self.spans["lane"] == Lane.DATA))

    def _with_copies(self, these: Array) -> Array:
        """Return (n,) whether a piece belongs to one of these spans, or is a copy within one of the same rank."""
        copies = self.spans["lane"] == Lane.HOST
        found: Array = these.copy()
        for rank in range(self.graph.world_size):
            mine = np.flatnonzero(self.spans["rank"] == rank)
            found[mine] |= lies_within(self.spans[mine], copies[mine], these[mine])
        return found[self.graph.row]

    @cached_property
    def loaded_at_once(self) -> Array:
        """(n,) seconds of the pieces if loading took no time."""
        return np.where(self.loads, 0.0, self.graph.took)

    @cached_property
    def equal(self) -> Array:
        """(n,) seconds of the pieces if, beside this, all ranks began at once and an action took its kind's mean.

        The mean is taken on each rank for each stage, and then over these, since a schedule may split the backwards of
        one stage more often than those of another.
        """
        took = np.where(self.graph.kind == Node.BEFORE, 0.0, self.loaded_at_once)
        return self.with_means(took, of_ranks=True)

    def with_means(self, took: Array, *, of_ranks: bool) -> Array:
        """Return (n,) seconds in which actions take their mean: of their kind on all ranks, or of their own place."""
        row = self.graph.row[self.work]
        of_row = np.bincount(row, took[self.work], len(self.spans))
        rows = np.unique(row)
        kind = self.spans["kind"][rows]
        where = np.stack([kind, self.spans["rank"][rows], self.spans["stage"][rows]], axis=1)
        places, place_of = np.unique(where, axis=0, return_inverse=True)
        by_place = _means(of_row[rows], place_of.ravel(), len(places))
        mean = _means(by_place, places[:, 0], len(Kind))[kind] if of_ranks else by_place[place_of.ravel()]
        scale = np.ones(len(self.spans))
        scale[rows] = np.divide(mean, of_row[rows], out=np.ones(len(rows)), where=of_row[rows] > 0)
        took[self.work] *= scale[row]
        return took

    @cached_property
    def active(self) -> Array:
        """(n,) whether a piece occupies a device, a link or a host."""
        return np.isin(self.graph.kind, (Node.WORK, Node.TRANSFER))

    @cached_property
    def hidden_seconds(self) -> float:
        """Seconds by which the step is longer than its pieces: loading or a copy at its end, beside a wait."""
        graph = self.graph
        end = metrics.extent(metrics.active(self.spans))[1] - graph.begin
        return end - float(graph.ends[self.active].max(initial=0.0))

    def split(self, took: Array) -> Array:
        """Return seconds of idle time, (ranks, causes), if the pieces take so long."""
        graph, causes = self.graph, np.zeros((self.graph.world_size, len(CAUSES)))
        ends = graph.play(took)
        end = float(ends[self.active].max(initial=0.0)) + self.hidden_seconds
        on_lane = np.isin(graph.kind, (Node.WORK, Node.WAIT, Node.GAP, Node.BEFORE))
        for rank in range(graph.world_size):
            pieces = np.flatnonzero(on_lane & (graph.rank == rank))
            worked = np.flatnonzero(self.work[pieces])
            if not len(worked):
                causes[rank, OTHER] = end
                continue
            at = 0.0
            for number, piece in enumerate(pieces[: worked[-1] + 1].tolist()):
                waiting = WARM_UP if number < worked[0] else DEPENDENCY
                for cause, until in self._parts(piece, ends, waiting):
                    if cause >= 0:
                        causes[rank, cause] += max(until - at, 0.0)
                    at = max(at, until)
            causes[rank, COOL_DOWN] = end - at
        return causes

    def _parts(self, piece: int, ends: Array, waiting: int) -> list[tuple[int, float]]:
        """Return the parts of a piece in order: the cause, -1 for work, and when it ends."""
        end = float(ends[piece])
        if self.work[piece]:
            return [(-1, end)]
        if self.loads[piece]:
            return [(DATA, end)]
        if self.graph.kind[piece] == Node.BEFORE:
            return [(WARM_UP, end)]
        ready, arrived = self.graph.arrival(piece, ends)
        return [(waiting, min(ready, end)), (COMMUNICATION, min(arrived, end)), (OTHER, end)]


def _means(values: Array, of: Array, groups: int) -> Array:
    """Return the mean of the values of each group, (groups,)."""
    count = np.bincount(of, minlength=groups)
    return np.asarray(np.bincount(of, values, groups) / np.maximum(count, 1))


APART = 0.02  # how far a bubble may be from theory without a word
JITTER = "jitter (equal actions took unlike times)"
"""The part of the imbalance that the plan does not cause: CPU ranks share cores."""
LEAST = 0.005  # the least share of a step that is named


def bubble_words(theory: float, timeline: Timeline | None = None) -> str:
    """Return the bubble in theory, were all stages equal and communication free; if the measured one differs, why.

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
    """Return the axes whose communication nothing hides, each a tenth of it or more, the longest first.

    A wait inside an action exposes the communication that it waits for, and no other.
    """
    spans = (one := timeline.last_step).spans
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
            others = awaits_other & (causes != axis)
            exposed[axis] += metrics.exposed_seconds(comm, spans[mine & compute & ~others])
    total = sum(exposed.values())
    ordered = sorted(exposed.items(), key=lambda each: -each[1])
    return ", ".join(axis for axis, time in ordered if axis and time >= 0.1 * total)


def _axis(timeline: Timeline, call: Array) -> str:
    kind, rank, group, peer = (int(call[name]) for name in ("kind", "rank", "group", "peer"))
    members = members_of(timeline, kind, rank, group, peer)
    return axis_of(timeline.mesh, members, timeline.meta, exchange=kind == Kind.ALL_TO_ALL)

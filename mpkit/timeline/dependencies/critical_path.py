"""CriticalPath: the operations that decide how long a step takes, and how much longer every other one might.

From the end of the step back to its begin: before an operation comes whatever ended last of all that it needed, which
is the rank's own previous operation, or a communication; and before a communication comes the rank that issued it last.

Waiting is charged to the rank that came last (`StepWaiting`), until it came; after that to the link.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.display import WidgetResult
from mpkit.timeline.dependencies.graph import Node, StepGraph, graph_of
from mpkit.timeline.replay.spans import ReplayResult
from mpkit.trace import Kind

MESSAGES = (Kind.SEND, Kind.RECV)


@dataclass(frozen=True)
class StepWaiting:
    """The waiting of one step."""

    ranks: Array  # (ranks, ranks) seconds: in row r what rank r waits for each rank that had not come yet
    under_way: Array  # (ranks,) seconds that a rank waits for communication that has begun
    last: Array  # (ranks,) to how many collectives each rank came last
    collectives: int  # how many collectives have a rank that came last


def waiting_of(graph: StepGraph, spans: Array) -> StepWaiting:
    """Return who waits for whom in a step."""
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
        came, late = (own, rank) if ready is None else (float(graph.ends[ready]), int(graph.rank[ready]))
        came = min(max(came, own), end)
        if late != rank and came > own:
            waits[rank, late] += came - own
        under_way[rank] += end - (came if late != rank else own)
    for ready in sorted(set(graph.ready_of.values())):
        if Kind(int(spans["kind"][graph.row[ready]])) in MESSAGES:
            continue
        times = sorted(graph.ends[need] for need in graph.needs[ready])
        last[graph.rank[ready]] += len(times) > 1 and times[-1] - times[-2] > close
    return StepWaiting(waits, under_way, last, int(last.sum()))


WORDS = {Node.GAP: "gap", Node.BEFORE: "before the step"}


@dataclass(frozen=True)
class PathOp:
    """A part of the critical path.

    Attributes:
        row: the row of its span in `timeline.spans` of the step; of a gap, the operation after it.
        rank: the rank that it is on.
        kind: the word of its kind, such as "forward"; "gap" where the rank did nothing known; "before the step" where
            it had not begun the step yet.
        stage, microbatch: -1: none.
        name: its name; "" if it has none.
        start, end: seconds from the begin of the step.
    """

    row: int
    rank: int
    kind: str
    stage: int
    microbatch: int
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How much of the step it is."""
        return self.end - self.start


@dataclass(frozen=True)
class CriticalPath(WidgetResult):
    """The operations that decide a step. It prints as a table, and is drawn over the timeline in a notebook.

    Attributes:
        timeline: the step's own timeline.
        step: its number; -1 if the timeline has no steps.
        ops: the operations in order; their lengths add up to the step.
        graph: the step as a graph.

    >>> import mpkit as mk
    >>> path = mk.simulate(mk.Plan.gpipe(2, 2), forward=[1, 3]).critical_path()
    >>> [(op.rank, op.kind, op.seconds) for op in path.ops][:3]
    [(0, 'forward', 1.0), (1, 'forward', 3.0), (1, 'forward', 3.0)]
    >>> path.step_time, path.if_free(kind="forward"), sorted(set(path.slack[path.slack >= 0].tolist()))
    (13.0, 7.0, [0.0, 2.0])
    """

    timeline: ReplayResult
    step: int
    ops: tuple[PathOp, ...]
    graph: StepGraph = field(repr=False)

    @property
    def step_time(self) -> float:
        """Seconds of the step."""
        return self.graph.step_time

    @property
    def by_rank(self) -> dict[int, float]:
        """Seconds of the path on each rank."""
        return self._sums("rank")

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds of the path by kind of operation, the most first."""
        return dict(sorted(self._sums("kind").items(), key=lambda each: -each[1]))

    @cached_property
    def waiting(self) -> StepWaiting:
        """Who waits for whom: each wait is charged to the rank that came last, until it came."""
        return waiting_of(self.graph, self.timeline.spans)

    def _sums(self, column: str) -> dict[Any, float]:
        sums: dict[Any, float] = {}
        for op in self.ops:
            key = getattr(op, column)
            sums[key] = sums.get(key, 0.0) + op.seconds
        return dict(sorted(sums.items()))

    @property
    def slack(self) -> Array:
        """Seconds that each span of the step may take longer without the step taking longer, (spans,).

        It is nan for spans that are no operations of their own: waits, steps, layers within an action.
        """
        slack = np.full(len(self.timeline.spans), np.nan)
        for row, nodes in self.graph.of_row.items():
            slack[row] = self.graph.slack[nodes].min()
        return slack

    def if_free(
        self, *, rank: int | None = None, kind: str | None = None, rows: Array | None = None
    ) -> float:
        """Return by how many seconds the step would be shorter if some operations took no time.

        A communication takes no time on all of its ranks then.

        Args:
            rank: those of this rank; None: of all.
            kind: those of this kind, such as "forward" or "all_reduce"; None: of all.
            rows: those of these spans of the step.

        Raises:
            ValueError: there are no such operations.
        """
        nodes = self.graph.nodes_of(self._rows(rank, kind) if rows is None else rows)
        return self.step_time - self.graph.time_with(self.graph.durations_without(nodes))

    def _rows(self, rank: int | None, kind: str | None) -> Array:
        spans = self.timeline.spans
        rows = np.array(sorted(self.graph.of_row), int)
        if rank is not None:
            rows = rows[spans["rank"][rows] == rank]
        if kind is not None:
            words = {each.word: int(each) for each in Kind}
            rows = rows[spans["kind"][rows] == words.get(kind, -1)]
        if not len(rows):
            there = sorted({Kind(int(k)).word for k in spans["kind"][sorted(self.graph.of_row)]})
            raise ValueError(
                f"rank={rank!r}, kind={kind!r}: the step has no such operations. It has the ranks 0 to "
                f"{self.timeline.world_size - 1} and {', '.join(there)}."
            )
        return rows


def critical_path(timeline: ReplayResult, step: int) -> CriticalPath:
    """Return the critical path of a timeline that holds one step."""
    graph = graph_of(timeline.spans, timeline.world_size, timeline.clock)
    ends = graph.ends.tolist()
    ops: list[PathOp] = []
    for piece in graph.chain():
        took = float(graph.took[piece])
        if took <= 0 and ends[piece] - took <= 0:
            continue
        row = int(graph.row[piece])
        span = timeline.spans[row]
        word = WORDS.get(Node(int(graph.kind[piece]))) or Kind(int(span["kind"])).word
        place = int(span["stage"]), int(span["microbatch"]), timeline.names[span["name"]]
        op = PathOp(row, int(graph.rank[piece]), word, *place, ends[piece] - took, ends[piece])
        if op.seconds <= 0:
            continue
        if ops and (ops[-1].row, ops[-1].kind) == (op.row, op.kind):
            op = replace(op, start=ops.pop().start)
        ops.append(op)
    return CriticalPath(timeline, step, tuple(ops), graph)

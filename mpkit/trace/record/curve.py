"""The curve of a step's memory: taken from a measured step, and put on the times of a later one.

    Segment    the changes between two boundaries of actions, at positions relative to the ops inside
    Curve      the segments of a step. While a later step runs, `play` only notes the times of its boundaries; `take`
               then returns the records of all noted segments at once: Python code between two actions runs outside the
               processor's caches, and takes several times as long

A position is the number of an edge plus the share of the way to the next edge. The edges of a segment are its
beginning, the beginnings of the ops inside, and its end:

    edges        0 ......... 1 ......... 2 ......... 3
                 begins      op          op          ends
    a change a quarter of the way from the first op's beginning to the second's: position 1.25
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from mpkit.common.arrays import Array
from mpkit.trace import CATEGORIES, MEMORY

_BUFFERS = CATEGORIES.index("buffers")
POINTS = 16
"""The most changes of a segment; a longer one sums up those in between, but for its peak."""


class Segment:
    """The changes of a rank's memory between two boundaries of actions.

    Args:
        mark: the boundary at its end: kind, name and details of the action that begins there; None: an action's end.
        edges: the number of its edges.
        records: (n,) of `MEMORY`, without times.
        position: (n,), where each of them is.

    Attributes:
        rows: (edge, share of the way to the next edge, category, bytes) of each record, of at most `POINTS`.
        peak: the number of rows up to the largest sum; 0: the sum is largest at the beginning.
        at_peak, in_all: the sums of the changes up to the peak, and of all of them, in bytes by category.
        changed: those of `in_all` that are not 0.
    """

    def __init__(self, mark: Hashable, edges: int, records: Array, position: Array) -> None:
        self.mark, self.edges = mark, edges
        self.peak = int(np.append(0, records["delta"].cumsum()).argmax())
        if len(records) > POINTS:
            records, position, self.peak = _thin(records, position, self.peak)
        position = np.maximum.accumulate(position)
        edge = np.minimum(position.astype(int), edges - 2)
        columns = edge, position - edge, records["category"], records["delta"]
        self.rows = list(zip(*(column.tolist() for column in columns), strict=True))
        self.at_peak, self.in_all = _sums(records[: self.peak]), _sums(records)
        self.changed = [(name, nbytes) for name, nbytes in self.in_all.items() if nbytes]

    @classmethod
    def measured(
        cls, mark: Hashable, changes: list[tuple[int, int, int, int]], first: int, times: Sequence[int]
    ) -> Segment:
        """Return the segment of these changes, as `Ledger.captured` has them.

        `first` is the number of ops begun before it, and `times` are those of its edges, in ns.
        """
        table, edges = np.array(changes, np.int64).reshape(-1, 4), np.array(times)
        edge = np.clip(table[:, 0] - first, 0, len(times) - 2)
        share = np.clip((table[:, 1] - edges[edge]) / np.maximum(edges[edge + 1] - edges[edge], 1), 0.0, 1.0)
        records = np.zeros(len(table), MEMORY)
        records["category"], records["delta"] = table[:, 2], table[:, 3]
        return cls(mark, len(times), records, edge + share)

    def repeats(self, other: Segment) -> bool:
        """Return whether two are equal but for states of the optimizer, which are made when they are first needed."""
        same = (
            self.at_peak[name] == other.at_peak[name] and self.in_all[name] == other.in_all[name]
            for name in CATEGORIES
            if name != "optimizer"
        )
        return self.mark == other.mark and all(same)


def _sums(records: Array) -> dict[str, int]:
    return {name: int(records["delta"][records["category"] == i].sum()) for i, name in enumerate(CATEGORIES)}


def _thin(records: Array, position: Array, peak: int) -> tuple[Array, Array, int]:
    """Sum up the changes between some points, one of which is the peak; return the rest, and the peak's place."""
    # Not np.unique, whose first call imports numpy.ma: 40 ms of CPU time in each rank.
    kinds = int(np.count_nonzero(np.bincount(records["category"])))
    points = np.linspace(0, len(records), max(POINTS // kinds, 2)).round().astype(int)
    ends = sorted({*points[1:].tolist(), peak} - {0})
    kept, at, begin = list[Array](), 0, 0
    for end in ends:
        by_category = _sums(records[begin:end]).values()
        sums = sorted((nbytes, i) for i, nbytes in enumerate(by_category) if nbytes)  # adds no peak
        summed = records[end - 1 : end].repeat(len(sums))
        summed["delta"], summed["category"] = zip(*sums, strict=True) if sums else ((), ())
        kept.append(summed)
        begin = end
        if end == peak:
            at = sum(map(len, kept))
    places = [position[end - 1].repeat(len(each)) for end, each in zip(ends, kept, strict=True)]
    return np.concatenate(kept), np.concatenate(places), at


class Curve:
    """The memory of a step: bytes by category before it (`levels`), and its segments.

    `marks` are the boundaries at their ends, and `next` is the number of the segment that is played next.
    """

    def __init__(self, levels: dict[str, int], segments: Sequence[Segment]) -> None:
        self.levels = levels
        self._segments = segments
        self.marks = [segment.mark for segment in segments]
        self.rewind()

    def repeats(self, other: Curve) -> bool:
        """Return whether all segments are equal, as in `Segment.repeats`."""
        mine, theirs = self._segments, other._segments
        return len(mine) == len(theirs) and all(map(Segment.repeats, mine, theirs))

    def rewind(self) -> None:
        """Begin to play the curve."""
        self.next = self._taken = 0
        self._noted: list[tuple[int, int, int, int]] = []  # of segments that `take` has not returned

    @property
    def next_peak(self) -> dict[str, int]:
        """Bytes by category that the next segment adds at its peak; none after the last one."""
        return self._segments[self.next].at_peak if self.next < len(self._segments) else {}

    def play(self, *place: int) -> None:
        """Note the place of the next segment: (ops begun before it, its start, ops begun at its end, its end)."""
        self.next += 1
        self._noted.append(place)  # type: ignore[arg-type]

    @property
    def is_pending(self) -> bool:
        """Whether segments are noted that `take` has not returned."""
        return self._taken < self.next

    @property
    def pending_peak(self) -> int:
        """Bytes that the last noted segment adds at its peak."""
        return sum(self._segments[self.next - 1].at_peak.values())

    def take(
        self, starts: Callable[[int, int], list[int]], spike: int = 0
    ) -> tuple[list[int], dict[str, int]]:
        """Return the segments noted since the last call, as `Ledger.write_all` takes them.

        `starts(first, count)` returns the starts of ops. A `spike` of "buffers" comes and goes at the peak of a single
        segment.
        """
        values: list[int] = []
        sums: dict[str, int] = {}
        for segment, (before, begin, after, end) in zip(
            self._segments[self._taken : self.next], self._noted, strict=True
        ):
            if segment.edges == 2:  # no op inside, as in most
                span = end - begin
                for _, share, category, delta in segment.rows:
                    values += (begin + int(share * span + 0.5), before, category, delta)
            else:
                times = [begin, *starts(before, min(after - before, segment.edges - 2))]
                times += [end] * (segment.edges - len(times))  # if fewer ops are inside than were measured
                for edge, share, category, delta in segment.rows:
                    time = times[edge] + int(share * (times[edge + 1] - times[edge]) + 0.5)
                    values += (time, min(before + edge, after), category, delta)
            for name, nbytes in segment.changed:
                sums[name] = sums.get(name, 0) + nbytes
            if spike > 0:
                at = 4 * segment.peak
                place = values[at - 4 : at - 2] if at else [begin, before]
                values[at:at] = [*place, _BUFFERS, spike, *place, _BUFFERS, -spike]
        self._taken = self.next
        self._noted.clear()
        return values, sums

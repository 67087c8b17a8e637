"""Timeline -> Picture: what every view draws, before anything is drawn.

A Picture has

    lanes      one per GPU for its compute, with thin ones below it for layers, communication, host copies
               and data loading; on a mesh of several axes in groups, each with a header
    spans      boxes in lanes, each with a colour key; idle time is a box too, so that the bubble is visible
    marks      where each step starts
    figures    the row under the picture: the clock in words, bubble, step time

Idle time is the part of a step that a rank's compute lane does not fill, waits included; time between steps does not
belong to the bubble, and is left blank.

A Picture computes `label(i)` and `hover(i)` of a box on demand, since of a million boxes few have room for text.
The functions here are pure. The terminal, SVG and canvas views each draw what they return.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.units import bytes_text, flops_text, percent, seconds
from mpkit.timeline import metrics
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind, Lane
from mpkit.views.drawing.colours import Key, key_of
from mpkit.views.drawing.lanes import clock_words, groups_of, rank_label
from mpkit.views.timeline.stages import layer_words, layers_of_span, stages_of
from mpkit.views.timeline.waits_in_vain import Wait, length_with_waits, waits_in_vain

INTERVAL = np.dtype([("start", "<f8"), ("end", "<f8")])


def step_extents(spans: Array) -> Array:
    """Return [start, end] of each step, merged where they overlap; (n, 2), sorted. Work outside any step is one."""
    work = metrics.active(spans)
    if np.any(work["step"] >= 0):
        work = work[work["step"] >= 0]
    _, where = np.unique(work["step"], return_inverse=True)
    extents = np.empty(where.max() + 1 if len(work) else 0, INTERVAL)
    extents["start"], extents["end"] = np.inf, -np.inf
    np.minimum.at(extents["start"], where, work["start"])
    np.maximum.at(extents["end"], where, work["end"])
    return metrics.covered_times(extents)


def subtract_spans(inner: Array, outer: Array) -> Array:
    """Return the parts of `outer` that are not in `inner`; both disjoint and sorted, as `metrics.covered` returns them.

    >>> subtract_spans(np.array([[1.0, 2.0], [5.0, 9.0]]), np.array([[0.0, 3.0], [4.0, 6.0]])).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """
    # The gaps of inner, cut at the borders of outer: sort all borders and keep the pieces that are
    # within outer and not within inner.
    cuts = np.unique(np.concatenate([inner.ravel(), outer.ravel()]))
    if len(cuts) < 2:
        return np.empty((0, 2))
    pieces = np.stack([cuts[:-1], cuts[1:]], axis=1)
    middle = pieces.mean(axis=1)
    keep = _spans_within(middle, outer) & ~_spans_within(middle, inner)
    joined = np.empty(int(keep.sum()), INTERVAL)
    joined["start"], joined["end"] = pieces[keep].T
    return metrics.covered_times(joined)


def idle_gaps(mine: Array, extents: Array) -> Array:
    """Return the [start, end] of a rank's idle times within steps, (n, 2) seconds, sorted."""
    waits, work = (metrics.covered_times(chosen(mine)) for chosen in (metrics.waits_within, metrics.work))
    return subtract_spans(subtract_spans(waits, work), extents)


def _spans_within(times: Array, intervals: Array) -> Array:
    if not len(intervals):
        return np.zeros(len(times), bool)
    at = np.searchsorted(intervals[:, 0], times, side="right") - 1
    mask: Array = (at >= 0) & (times < intervals[at, 1])
    return mask


_COLUMNS = {"row": "<i4", "key": "u1", "named": "?", "start": "<f8", "end": "<f8", "span": "<i4"}
BOX = np.dtype([*_COLUMNS.items()])
"""A box: the index of its row, its colour `Key`, whether it carries its span's number (if a span is drawn in pieces,
the longest one does), seconds from the picture's start, and the span it shows (for idle time the first wait in it;
-1: none)."""


@dataclass(frozen=True)
class PictureRow:
    """One horizontal strip.

    `part` is "compute", "layers", "comm", "host" or "data"; or "group" for the header of the rows below.
    """

    rank: int
    part: str
    label: str


@dataclass(frozen=True)
class Mark:
    """A moment to mark with a line, in seconds from the picture's start."""

    time: float
    text: str


@dataclass(frozen=True)
class Picture:
    """What to draw, in seconds from `origin`; see the module's docstring. `boxes` is an array of `BOX`."""

    timeline: Timeline
    rows: list[PictureRow]
    boxes: Array
    marks: list[Mark]
    origin: float
    duration: float
    figures: dict[str, str]
    waits: tuple[Wait, ...] = ()

    @property
    def keys(self) -> list[Key]:
        """The keys that the legend has to explain, in its order, idle last."""
        there = {Key(int(key)) for key in np.unique(self.boxes["key"])}
        return sorted(there, key=lambda key: (key == Key.IDLE, key))

    @cached_property
    def row_of(self) -> dict[tuple[int, str], int]:
        """The number of each row, by its rank and part."""
        return {(row.rank, row.part): number for number, row in enumerate(self.rows)}

    def of_row(self, row: int) -> Array:
        """Return the boxes of one row, sorted by their start."""
        boxes: Array = self.boxes[self.boxes["row"] == row]
        return boxes

    def label(self, box: Array) -> str:
        """Return the micro-batch number, if the box has one."""
        microbatch = int(self.timeline.spans[box["span"]]["microbatch"]) if box["span"] >= 0 else -1
        return str(microbatch) if microbatch >= 0 and box["named"] else ""

    @cached_property
    def stages(self) -> dict[int, list[int]]:
        """The stages of each rank that has several, in their order."""
        return stages_of(self.timeline)

    @cached_property
    def layers(self) -> list[str]:
        """The layers of each stage in words, where a run has noted them."""
        return layer_words(self.timeline)

    def hover(self, box: Array) -> str:
        """Return the text shown when the pointer rests on the box, one fact per line."""
        facts = describe(self.timeline, int(box["span"])) if box["span"] >= 0 else []
        if box["span"] >= 0 and (layers := layers_of_span(self.layers, self.timeline.spans[box["span"]])):
            facts.insert(1, f"layers {layers}")
        if box["key"] == Key.IDLE:
            facts.insert(0, f"idle for {seconds(float(box['end'] - box['start']))}")
        return "\n".join(facts)

    def idle_share(self, rank: int) -> float:
        """Return the share of the steps' time in which this rank computes nothing."""
        row = next(i for i, row in enumerate(self.rows) if row.rank == rank and row.part == "compute")
        mine = self.of_row(row)
        length = mine["end"] - mine["start"]
        idle = float(length[mine["key"] == Key.IDLE].sum())
        total = float(length.sum())
        return idle / total if total else 0.0


def picture(timeline: Timeline, step: int | None = None, *, fold: bool = False) -> Picture:
    """Make the picture of a timeline, or of one of its steps; `fold`: with only the first rank of each group."""
    chosen = np.ones(len(timeline.spans), bool) if step is None else timeline.spans["step"] == step
    # Spans that take no time (a message without a hop, in a simulation) would be invisible.
    chosen &= (timeline.spans["lane"] != Lane.NONE) & (timeline.spans["end"] > timeline.spans["start"])
    drawn = np.flatnonzero(chosen)
    spans = timeline.spans[drawn]
    # A rank that waits for its first message while others end the step before is not in this picture yet.
    origin, end = metrics.extent(metrics.active(spans))
    duration, marks = end - origin, _marks(spans, origin)
    rows = _rows(timeline, spans, fold)
    shown = np.isin(spans["rank"], [row.rank for row in rows if row.part == "compute"])
    spans, drawn = spans[shown], drawn[shown]
    boxes = np.concatenate([_idle_boxes(spans, drawn, rows), _span_boxes(spans, drawn, rows)])
    boxes["start"] -= origin
    boxes["end"] -= origin
    boxes = boxes[np.lexsort((boxes["start"], boxes["row"]))]
    waits = waits_in_vain(timeline, origin) if step is None else ()
    if waits:
        duration = length_with_waits(timeline, origin)
    return Picture(timeline, rows, boxes, marks, origin, duration, figures(timeline, step), waits)


def figures(timeline: Timeline, step: int | None = None) -> dict[str, str]:
    """Return the row under a picture: its clock in words, and the figures of the last step (or of `step`)."""
    shown = {"clock": clock_words(timeline)}
    hardware = timeline.meta.get("hardware")
    if hardware and timeline.clock != "simulated":
        shown["hardware"] = str(hardware)
    complete = step is None or step in timeline.steps
    if complete and len(metrics.work(timeline.spans)):
        of = timeline if step is None else timeline.step(step)
        shown["bubble"] = percent(of.bubble)
        shown["step time"] = seconds(of.step_time)
    return shown


def describe(timeline: Timeline, index: int) -> list[str]:
    """Describe one span: what it is, when, how much, and what a wait waited for."""
    span = timeline.spans[index]
    facts = [" · ".join(_describe_span(timeline, span))]
    start = float(span["start"]) - float(timeline.spans["start"].min())
    facts.append(f"from {seconds(start)}, for {seconds(float(span['end'] - span['start']))}")
    written = {"bytes": bytes_text, "flops": flops_text}
    amounts = [words(float(span[name])) for name, words in written.items() if span[name] > 0]
    facts += [", ".join(amounts)] * bool(amounts)
    if span["kind"] == Kind.WAIT and 0 <= span["cause"] < len(timeline.spans):
        cause = timeline.spans[span["cause"]]
        whom, what = rank_label(timeline, int(cause["rank"])), " · ".join(_describe_span(timeline, cause))
        facts.append(f"waited for {whom}: {what}")
    return facts


def _describe_span(timeline: Timeline, span: Array) -> list[str]:
    kind = int(span["kind"])
    words = [Kind(kind).word.replace("_", " ") if kind in set(Kind) else f"kind {kind}"]
    name = timeline.names[span["name"]] if 0 <= span["name"] < len(timeline.names) else "?"
    words += [name] if name else []
    for column in ("microbatch", "stage", "step"):
        if span[column] >= 0:
            words.append(f"{'micro-batch' if column == 'microbatch' else column} {span[column]}")
    if span["peer"] >= 0:
        way = {Kind.SEND: "to", Kind.RECV: "from"}.get(Kind(kind), "root") if kind in set(Kind) else "peer"
        words.append(f"{way} rank {timeline.rank_number(int(span['peer']))}")
    return words


_PARTS = ("compute", "layers", "comm", "host", "data")


def _part_of(spans: Array) -> Array:
    """Return for each span the index into _PARTS of the row it is drawn in."""
    part = np.select([spans["lane"] == lane for lane in (Lane.COMM, Lane.HOST, Lane.DATA)], [2, 3, 4], 0)
    return np.asarray(np.where((part == 0) & (spans["depth"] > 0), 1, part))


def _rows(timeline: Timeline, spans: Array, fold: bool) -> list[PictureRow]:
    """Return the rows: compute for every rank; a thin row for every rank if any rank has something in it; headers."""
    parts = sorted({0, *np.unique(_part_of(spans[spans["kind"] != Kind.WAIT])).tolist()})

    def lanes(rank: int) -> list[PictureRow]:
        label = rank_label(timeline, rank)
        return [PictureRow(rank, _PARTS[part], label if part == 0 else _PARTS[part]) for part in parts]

    groups = groups_of(timeline)
    if not groups:
        return [row for rank in range(timeline.world_size) for row in lanes(rank)]
    rows = []
    for group in groups:
        rows.append(PictureRow(group.ranks[0], "group", group.folded_heading if fold else group.heading))
        rows += [row for rank in group.ranks[: 1 if fold else None] for row in lanes(rank)]
    return rows


def _span_boxes(spans: Array, drawn: Array, rows: list[PictureRow]) -> Array:
    index = np.full((max((row.rank for row in rows), default=0) + 1, len(_PARTS)), -1)
    for number, row in enumerate(rows):
        if row.part in _PARTS:
            index[row.rank, _PARTS.index(row.part)] = number
    boxes = np.empty(len(spans), BOX)
    boxes["row"] = index[spans["rank"], _part_of(spans)]
    boxes["key"], boxes["named"] = key_of(spans["kind"]), True
    boxes["start"], boxes["end"], boxes["span"] = spans["start"], spans["end"], drawn
    # A wait is idle time, which idle_gaps already covers, together with what surrounds it.
    shown = spans["kind"] != Kind.WAIT
    return _around_waits(boxes[shown], spans["rank"][shown], metrics.waits_within(spans))


def _around_waits(boxes: Array, ranks: Array, waits: Array) -> Array:
    """Cut the boxes of actions that wait in their middle into the parts before and after the waits."""
    cut = np.zeros(len(boxes), bool)
    pieces = []
    for rank in np.unique(waits["rank"]).tolist():
        idle = metrics.covered_times(waits[waits["rank"] == rank])
        first = np.searchsorted(idle[:, 1], boxes["start"], side="right")
        after = np.searchsorted(idle[:, 0], boxes["end"], side="left")
        mine = np.flatnonzero((ranks == rank) & (boxes["key"] < Key.COMM) & (after > first))
        cut[mine] = True
        pieces.append(_pieces(boxes[mine], idle, first[mine], after[mine] - first[mine]))
    return np.concatenate([boxes[~cut], *pieces])


def _pieces(boxes: Array, idle: Array, first: Array, count: Array) -> Array:
    """Cut each box at its `count` idle times, numbered from `first` on: a piece before each, one after the last."""
    owner = np.repeat(np.arange(len(boxes)), count + 1)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count + 1) - count - 1, count + 1)
    pieces = boxes[owner]
    last, gap = nth == count[owner], first[owner] + nth
    pieces["start"] = np.where(nth == 0, pieces["start"], idle[gap - 1, 1])
    pieces["end"] = np.where(last, pieces["end"], idle[np.minimum(gap, len(idle) - 1), 0])
    there = pieces["end"] > pieces["start"]
    pieces, owner = pieces[there], owner[there]
    # The longest piece of each box carries its number.
    order = np.lexsort((pieces["start"] - pieces["end"], owner))
    pieces["named"][order] = np.diff(owner[order], prepend=-1) > 0
    return pieces


def _idle_boxes(spans: Array, drawn: Array, rows: list[PictureRow]) -> Array:
    boxes = []
    extents = step_extents(spans)
    for number, row in enumerate(rows):
        if row.part == "compute":
            gaps = idle_gaps(spans[spans["rank"] == row.rank], extents)
            mine = np.zeros(len(gaps), BOX)
            mine["row"], mine["key"], mine["span"] = number, Key.IDLE, _waits_in(spans, drawn, row.rank, gaps)
            mine["start"], mine["end"] = gaps[:, 0], gaps[:, 1]
            boxes.append(mine)
    return np.concatenate(boxes) if boxes else np.empty(0, BOX)


def _waits_in(spans: Array, drawn: Array, rank: int, gaps: Array) -> Array:
    """Return for each gap of a rank the span of the first wait in it, -1 if there is none."""
    waits = np.flatnonzero((spans["rank"] == rank) & (spans["kind"] == Kind.WAIT))
    if not len(waits):
        return np.full(len(gaps), -1)
    after = np.minimum(np.searchsorted(spans["end"][waits], gaps[:, 0], side="right"), len(waits) - 1)
    wait = spans[waits[after]]
    there = (wait["start"] < gaps[:, 1]) & (wait["end"] > gaps[:, 0])
    return np.asarray(np.where(there, drawn[waits[after]], -1))


def _marks(spans: Array, origin: float) -> list[Mark]:
    """Return a mark where each step starts on its first rank, if there are several steps."""
    spans = metrics.active(spans)
    steps = [step for step in np.unique(spans["step"]).tolist() if step >= 0]
    if len(steps) < 2:
        return []
    starts = [float(spans["start"][spans["step"] == step].min()) for step in steps]
    return [Mark(start - origin, f"step {step}") for start, step in zip(starts, steps, strict=True)]


# ---- many boxes on few pixels
# A strip of W pixels can show W things. If more boxes fall on it, each pixel shows the work that takes most of it, as
# strongly as the pixel is busy. The size of a picture is therefore bounded by its pixels, not by its boxes.


def coverage(boxes: Array, pixels: int, duration: float) -> Array:
    """Compute the share of each pixel that each key covers, (len(Key), pixels), from an array of `BOX`."""
    scale = pixels / duration if duration else 0.0
    start = np.clip(boxes["start"] * scale, 0, pixels)
    end = np.clip(boxes["end"] * scale, 0, pixels)
    first = np.minimum(start.astype(np.intp), pixels - 1)
    last = np.minimum(end.astype(np.intp), pixels - 1)
    row = boxes["key"].astype(np.intp) * (pixels + 1)

    # Whole pixels by a running sum: +1 where a box's whole pixels begin, -1 where they end ...
    size = len(Key) * (pixels + 1)
    steps = np.bincount(row + first, minlength=size) - np.bincount(row + last, minlength=size)
    whole = np.cumsum(steps.reshape(len(Key), -1).astype(float), axis=1)
    # ... and the parts of its first and last pixel: the first minus what is before it, the last's own part.
    part = np.bincount(row + first, first - start, minlength=size)
    part += np.bincount(row + last, end - last, minlength=size)
    return np.asarray((whole + part.reshape(len(Key), -1))[:, :pixels])


def strongest(cover: Array, *, least: float = 0.0) -> tuple[Array, Array]:
    """Return for each pixel the key of the work that covers most of it, and the share that is busy (0 to 1).

    A pixel that is busy for no more than `least` of its time has key IDLE if it contains idle time, else -1: blank.
    """
    work = cover[1:]
    busy = np.minimum(work.sum(axis=0), 1.0)
    rest = np.where(cover[Key.IDLE] > 1e-9, Key.IDLE, -1)
    return np.where(busy > least + 1e-9, 1 + work.argmax(axis=0), rest), busy


def runs(values: Array) -> list[tuple[int, int]]:
    """Return [first, after) of each run of equal values.

    >>> runs(np.array([7, 7, 1]))
    [(0, 2), (2, 3)]
    """
    if not len(values):
        return []
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return list(pairwise(edges))

"""A critical path: as a table, drawn over the timeline, and packed for the interactive one (`path.js`).

outlines   around the operations that decide the step; those too narrow to see share one with their neighbours in the
           row, since thousands of outlines on a few hundred pixels would be a black slab that hides what it marks
lines      from rank to rank, where one waited for the other
table      the path by kind and by rank, and its longest operations with what the step would be without them
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.safe_text import escape
from mpkit.common.table import table_text
from mpkit.common.units import percent, seconds
from mpkit.timeline import metrics
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Lane
from mpkit.views.theme import page_style
from mpkit.views.timeline.picture import Picture
from mpkit.views.timeline.svg import HEIGHTS, Plot, svg

if TYPE_CHECKING:
    from mpkit.timeline.dependencies.critical_path import CriticalPath, PathOp


MOST = 20_000
"""The most operations of a step whose path is put into a page, in which no kernel could find it later."""

GAINS = 200
"""The longest operations of a path of which it is said what the step would be without them."""

NARROW = 6.0
"""Pixels: what is narrower shares an outline."""

WHATS = {"gap": "gap", "before the step": "before"}


def has_path(timeline: Timeline) -> bool:
    """Return whether a timeline has a step to find the path of: operations, none of which waits in vain."""
    return bool(len(metrics.work(timeline.spans))) and not timeline.meta.get("waiting")


def path_of(timeline: Timeline, step: int | None = None) -> tuple[dict[str, Any], bytes]:
    """Return the critical path of a step, packed; None: of the last complete one."""
    path = timeline.critical_path(step)
    whole = timeline.spans["step"] == path.step if path.step >= 0 else np.ones(len(timeline.spans), bool)
    return pack_path(path, np.flatnonzero(whole), len(timeline.spans))


def pack_path(
    path: CriticalPath, rows: Array | None = None, count: int | None = None
) -> tuple[dict[str, Any], bytes]:
    """Return what is in a path, as JSON, and the slack in seconds of all spans, (count,) float32; nan: it has none.

    >>> import mpkit as mk
    >>> head, slack = pack_path(mk.simulate(mk.Plan.gpipe(2, 1), forward=[1, 3]).critical_path())
    >>> [(rank, start, end, what) for _, rank, start, end, what in head["ops"]][:2]
    [(0, 0.0, 1.0, 'op'), (1, 1.0, 4.0, 'op')]

    `rows` are those of the step's spans among the `count` spans of the view; None: the view has only the step's.
    """
    step = path.timeline.spans
    rows = np.arange(len(step)) if rows is None else rows
    slack = np.full(len(step) if count is None else count, np.nan, "<f4")
    slack[rows] = path.slack
    begin = path.graph.begin
    ops = [
        [int(rows[op.row]), op.rank, begin + op.start, begin + op.end, WHATS.get(op.kind, "op")]
        for op in path.ops
    ]
    longest = sorted((op for op in path.ops if op.kind not in WHATS), key=lambda op: -op.seconds)[:GAINS]
    free = {int(rows[op.row]): path.if_free(rows=np.array([op.row])) for op in longest}
    return {"step": path.step, "words": heading(path), "ops": ops, "free": free}, slack.tobytes()


LONGEST = 10
"""How many operations of a path are listed."""

PARTS = {Lane.COMM: "comm", Lane.HOST: "host", Lane.DATA: "data"}
"""By lane, the part of a rank's lanes that it is drawn in; "compute" else."""


def critical_text(path: CriticalPath) -> str:
    """Return the path by kind and rank, and its longest operations."""
    whole = path.step_time or 1.0
    kinds = [["on the path", "share", "if free", "kind"]]
    kinds += [
        [seconds(on), percent(on / whole), _gain(path, kind, kind=kind), kind.replace("_", " ")]
        for kind, on in path.by_kind.items()
    ]
    number = path.timeline.rank_number
    shares = (f"rank {number(rank)} {percent(on / whole)}" for rank, on in path.by_rank.items())
    longest = sorted(sorted(path.ops, key=lambda op: -op.seconds)[:LONGEST], key=lambda op: op.start)
    ops = [["start", "takes", "if free", "operation"]]
    for op in longest:
        gain = _gain(path, op.kind, rows=np.array([op.row]))
        ops.append([seconds(op.start), seconds(op.seconds), gain, op_words(path, op)])
    left = len(path.ops) - LONGEST
    more = f"and {left:,} shorter ones, in path.ops; path.slack has how much longer every other may take."
    return "\n".join(
        [heading(path), *table_text(kinds, (3,)), f"It is on {', '.join(shares)}.", *table_text(ops, (3,)),
         *[more] * (left > 0)]
    )  # fmt: skip


def heading(path: CriticalPath) -> str:
    """Say what decides the step."""
    what = f"step {path.step}" if path.step >= 0 else "the timeline"
    ranks, of, ops = len(path.by_rank), path.timeline.world_size, len(path.ops)
    where = f"{ranks} of {of} rank{'s' * (of != 1)}"
    return f"Critical path of {what}: {seconds(path.step_time)} through {ops:,} operation{'s' * (ops != 1)} on {where}."


def op_words(path: CriticalPath, op: PathOp) -> str:
    """Name an operation: its rank, kind, name, stage and micro-batch."""
    words = [f"rank {path.timeline.rank_number(op.rank)}", op.kind.replace("_", " ")]
    words += [op.name] if op.name else []
    words += [f"micro-batch {op.microbatch}"] if op.microbatch >= 0 else []
    words += [f"stage {op.stage}"] if op.stage >= 0 else []
    return " · ".join(words)


def _gain(path: CriticalPath, word: str, **these: Any) -> str:
    """Return by how much the step would be shorter without an operation, or without all of its kind."""
    if word in WHATS:
        return ""
    gain = path.if_free(**these)
    return f"-{seconds(gain)}" if gain > 0 else "0 s"


# ---- drawn


def critical_svg(path: CriticalPath, width: int = 960) -> str:
    """Draw the timeline of the step with the path over it."""
    timeline = path.timeline
    assert isinstance(timeline, Timeline)
    title = "Critical path" + (f" of step {path.step}" if path.step >= 0 else "")
    return svg(timeline, width, title=title, over=lambda pic, tops, plot: outline_path(path, pic, tops, plot))


def outline_path(path: CriticalPath, pic: Picture, tops: list[float], plot: Plot) -> str:
    """Return outlines around the path's operations, and lines from rank to rank."""
    begin, lanes = path.graph.begin, path.timeline.spans["lane"]
    boxes = []
    for op in path.ops:
        part = "compute" if op.kind in WHATS else PARTS.get(Lane(lanes[op.row]), "compute")
        words = f"critical: {op_words(path, op)}, {seconds(op.seconds)}"
        times = begin + op.start, begin + op.end
        boxes += outline_span(pic, tops, plot, op.rank, part, *times, words, op.kind == "gap")
    outlines = merge_outlines(boxes)
    parts = [each.svg() for each in outlines]
    for before, after in pairwise(outlines):
        if before.y != after.y:
            down = after.y > before.y
            y1, y2 = (before.y + before.height, after.y) if down else (before.y, after.y + after.height)
            ends = f'x1="{before.end:.2f}" y1="{y1:g}" x2="{after.x:.2f}" y2="{y2:g}"'
            parts.append(f'<line class="path" {ends}/>')
    return f'<g aria-label="critical path">{"".join(parts)}</g>'


def outline_span(
    pic: Picture, tops: list[float], plot: Plot, rank: int, part: str, start: float, end: float, words: str = "",
    dashed: bool = False,
) -> list[Outline]:  # fmt: skip
    """Return the outline around what a rank did between two times; nothing if its lane is folded."""
    number = pic.row_of.get((rank, part))
    if number is None:
        return []
    scale = plot.span / pic.duration if pic.duration else 0.0
    x = plot.left + (start - pic.origin) * scale
    return [Outline(x, (end - start) * scale, tops[number], HEIGHTS[part], words, dashed)]


def page(title: str, body: str) -> str:
    """Return one self-contained HTML page."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title><style>'
        f"{page_style()}td,th{{text-align:left;padding:.2rem .8rem .2rem 0;vertical-align:top}}"
        f"svg{{max-width:100%;height:auto}}</style></head><body><main>{body}</main></body></html>\n"
    )


# ---- outlines


@dataclass(frozen=True)
class Outline:
    """A box around one operation, or around several, in pixels."""

    x: float
    width: float
    y: float
    height: float
    words: str = ""  # shown when the pointer rests on it
    dashed: bool = False  # around a gap, in which nothing happens
    count: int = 1  # of operations

    @property
    def end(self) -> float:
        """The x of its right side."""
        return self.x + self.width

    def svg(self) -> str:
        """Return it as an SVG element of class "path"."""
        dashes = ' stroke-dasharray="3 2"' if self.dashed else ""
        words = self.words if self.count == 1 else f"{self.count:,} operations, from {self.words}"
        hover = f"<title>{escape(words)}</title>" if self.words else ""
        return (
            f'<rect class="path" x="{self.x:.2f}" y="{self.y:g}" width="{max(self.width, 0.5):.2f}" '
            f'height="{self.height:g}"{dashes}' + (f">{hover}</rect>" if hover else "/>")
        )


def merge_outlines(boxes: Iterable[Outline]) -> list[Outline]:
    """Return the outlines, in the order of their starts or of a path; of neighbours in a row, narrow ones are one.

    >>> slim = [Outline(x, 1, 0, 9) for x in (0, 2, 4)]
    >>> [(box.x, box.width, box.count) for box in merge_outlines([*slim, Outline(40, 20, 0, 9), Outline(60, 20, 0, 9)])]
    [(0, 5, 3), (40, 20, 1), (60, 20, 1)]
    """
    found: list[Outline] = []
    for box in boxes:
        last = found[-1] if found else None
        slim = last is not None and (box.width < NARROW or last.width < NARROW or last.count > 1)
        if last is None or not slim or box.y != last.y or box.x - last.end > NARROW:
            found.append(box)
            continue
        width, dashed = max(box.end, last.end) - last.x, last.dashed and box.dashed
        found[-1] = replace(last, width=width, dashed=dashed, count=last.count + box.count)
    return found

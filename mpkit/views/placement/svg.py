"""A placement as SVG: ranks as boxes, nodes around them, a line for each pair of neighbours of a group.

columns   stages from left to right; within a stage cp, then tp
rows      replicas
lines     a colour per axis; thin and dashed from node to node
below     which ranks communicate over which links; which elements of each parameter ZeRO gives to which replica, and
          which rows and columns of layers tp gives to which rank
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from mpkit.common.safe_text import escape
from mpkit.plan.mesh import place_text
from mpkit.strategies.placement.placement import Talk, brief
from mpkit.views.chart.frame import words_at
from mpkit.views.drawing.colours import ink_of
from mpkit.views.drawing.sheet import faint_lines, sheet
from mpkit.views.placement.text import (
    divided_heading,
    divided_layers,
    groups_words,
    held_words,
    link_words,
    shape_words,
    share_rows,
)  # fmt: skip
from mpkit.views.theme import MARGIN, THEMES, wrap_words

if TYPE_CHECKING:
    from mpkit.strategies.placement.placement import Placement


TALL, APART, BETWEEN, BELOW = 50.0, 26.0, 44.0, 58.0
"""Pixels: the height of a box, and the distances to the next one in its stage, in the next stage, in the next row."""

NARROW, WIDE = 46.0, 196.0
TOP, ROWS = 108.0, 12


class RankBox(NamedTuple):
    """The place where a rank is drawn."""

    x: float
    y: float
    wide: float
    column: int
    row: int

    @property
    def middle(self) -> float:
        """The x of its centre."""
        return self.x + self.wide / 2


def placement_svg(placement: Placement, width: int = 960) -> str:
    """Draw the picture as a standalone SVG document."""
    boxes = _boxes(placement, width)
    right, bottom = max(box.x + box.wide for box in boxes), max(box.y for box in boxes) + TALL
    whole = max(width, right + MARGIN + 10)
    nodes, names = _nodes(placement, boxes)
    body = [*_stages(placement, boxes), *nodes]
    body += [line for talk in placement.talks for line in _lines(talk, boxes, placement)] + names
    body += [_rank(placement, rank, box) for rank, box in enumerate(boxes)]
    legend, y = _legend(placement, bottom + 52, whole)
    shards, y = _zero(placement, y, whole) if placement.zero else ([], y)
    table, y = _divided(placement, y, whole)
    lines = [line for note in placement.notes for line in wrap_words(note, whole - 2 * MARGIN)]
    notes, height = faint_lines(lines, y), y + 20 * len(lines)
    classes = {
        name: {
            "box": f"fill:{theme.ground};stroke:{theme.hatch}",
            "node": f"fill:{theme.idle}",
            "tag": f"fill:{theme.faint};stroke:{theme.idle};stroke-width:5;paint-order:stroke",  # over lines
        }
        for name, theme in THEMES.items()
    }
    title, parts = f"Placement of {placement.mesh.size} ranks", [*body, *legend, *shards, *table, *notes]
    head = shape_words(placement)
    return sheet("placement", title, str(placement), parts, whole, height, head=head, classes=classes)


def _boxes(placement: Placement, width: int) -> list[RankBox]:
    """Place a box per rank: stages from left to right, replicas one below the other; on one axis, a node per row."""
    mesh = placement.mesh
    inner = mesh.size // (mesh.pp * mesh.dp)
    alone = sum(degree > 1 for degree in mesh.shape) < 2
    across = mesh.pp * inner
    if alone:
        across = min(mesh.size, placement.hardware.per_node if placement.hardware else 8, 16)
        inner = across
    gaps = (across - across // inner) * APART + (across // inner - 1) * BETWEEN
    wide = min(max((width - 2 * MARGIN - 20 - gaps) / across, NARROW), WIDE)
    top = TOP if placement.stages or mesh.pp > 1 else TOP - 34
    boxes = []
    for rank in range(mesh.size):
        at = mesh.place(rank)
        column, row = divmod(rank, across)[::-1] if alone else (at.pp * inner + rank % inner, at.dp)
        x = MARGIN + 10 + column * (wide + APART) + column // inner * (BETWEEN - APART)
        boxes.append(RankBox(x, top + row * (TALL + BELOW), wide, column, row))
    return boxes


def _stages(placement: Placement, boxes: list[RankBox]) -> Iterator[str]:
    """Draw a heading over each column of stages: their numbers, and the layers in them."""
    mesh = placement.mesh
    if mesh.pp == 1 and not placement.stages:
        return
    for pp in range(mesh.pp):
        ranks = [rank for rank in range(mesh.size) if mesh.place(rank).pp == pp]
        left, right = boxes[ranks[0]].x, max(boxes[rank].x + boxes[rank].wide for rank in ranks)
        if boxes[ranks[0]].row and mesh.dp * mesh.cp * mesh.tp == 1:
            continue  # a single axis in several rows
        numbers = placement.stages_of(ranks[0]) or [pp]
        name = f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        letters = max(int((right - left) / 6), 8)
        held = brief(placement.layers_of(ranks[0]))
        lines = wrap(held, letters) or [""]
        more = lines[0] + (" …" if len(lines) > 1 else "")
        yield words_at(left, 56, name, "words", ' font-weight="600"')
        yield f"<g><title>{escape(held)}</title>{words_at(left, 72, more, 'faint')}</g>" if held else ""


def _nodes(placement: Placement, boxes: list[RankBox]) -> tuple[list[str], list[str]]:
    """Draw a rectangle around each node's ranks, and its name.

    If a node's ranks are not adjacent, each run of neighbours gets a rectangle of its own.
    """
    drawn, named = [], []
    for number, ranks in enumerate(placement.nodes if placement.hardware else []):
        mine = [boxes[rank] for rank in ranks]
        columns, rows = {box.column for box in mine}, sorted({box.row for box in mine})
        full = len(mine) == (max(columns) - min(columns) + 1) * (rows[-1] - rows[0] + 1)
        for piece in [mine] if full else _neighbours(mine):
            left, right = min(box.x for box in piece) - 10, max(box.x + box.wide for box in piece) + 10
            top, bottom = min(box.y for box in piece) - 24, max(box.y for box in piece) + TALL + 24
            drawn.append(
                f'<rect class="node" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                f'height="{bottom - top:.1f}" rx="10"/>'
            )
            named.append(words_at(left + 10, bottom - 7, f"node {number}", "tag", ' font-size="11"'))
    return drawn, named


def _neighbours(boxes: list[RankBox]) -> list[list[RankBox]]:
    """Group the boxes that are next to each other in a row."""
    rows: list[list[RankBox]] = []
    for box in sorted(boxes, key=lambda box: (box.row, box.column)):
        last = rows[-1][-1] if rows else None
        if last is not None and (last.row, last.column + 1) == (box.row, box.column):
            rows[-1].append(box)
        else:
            rows.append([box])
    return rows


def _lines(talk: Talk, boxes: list[RankBox], placement: Placement) -> Iterator[str]:
    """Draw a line from each rank to the next of its group."""
    for group in talk.groups:
        for one, other in pairwise(group):
            told = f"{talk.axis}: rank {one} and rank {other}{link_words(talk)}"
            crosses = placement.node_of(one) != placement.node_of(other)
            look = _look(ink_of(talk.axis), crosses)
            path = _path(boxes[one], boxes[other], talk.axis)
            yield f'<path fill="none" {look} d="{path}"><title>{escape(told)}</title></path>' if path else ""


def _look(ink: str, crosses: bool) -> str:
    """Return the attributes of a line: thin and dashed from node to node."""
    width = 'stroke-width="2" stroke-dasharray="5 4"' if crosses else 'stroke-width="3.5"'
    return f'stroke="{ink}" {width}'


def _path(a: RankBox, b: RankBox, axis: str) -> str:
    """Return a straight path to a neighbour, else one around the boxes between: above, or for cp below."""
    if a.row == b.row and b.column == a.column + 1:
        return f"M{a.x + a.wide:.1f} {a.y + TALL / 2:.1f}H{b.x:.1f}"
    if a.row == b.row:
        many, below = b.column - a.column, axis == "cp"  # as many lines overlap
        high = 8.0 + min(14.0 / max(many - 1, 1), 8.0) * (a.column % many)
        start, turn = (a.y + TALL, a.y + TALL + high) if below else (a.y, a.y - high)
        corner = 6 if below else -6  # towards the line
        x1, x2 = (a.middle - 14, b.middle - 8) if below else (a.middle + 18, b.middle + 8)
        return (
            f"M{x1:.1f} {start:.1f}V{turn - corner:.1f}Q{x1:.1f} {turn:.1f} {x1 + 6:.1f} {turn:.1f}"
            f"H{x2 - 6:.1f}Q{x2:.1f} {turn:.1f} {x2:.1f} {turn - corner:.1f}V{start:.1f}"
        )
    if a.column == b.column and b.row == a.row + 1:
        return f"M{a.middle - 8:.1f} {a.y + TALL:.1f}V{b.y:.1f}"
    return ""  # from the end of a row to the beginning of the next


def _rank(placement: Placement, rank: int, box: RankBox) -> str:
    """Draw a box: the rank, its place, and as its title all that it holds."""
    mesh, roomy = placement.mesh, box.wide >= 84
    at = place_text(mesh, rank)
    parts = [
        f"{name}: {placement.part(name, rank)}"
        for name in {**placement.shards, **placement.experts}
        if placement.part(name, rank)
    ]
    told = "\n".join([f"rank {rank}  {at}", *[brief(placement.layers_of(rank))], *parts[:40]])
    lines = [
        _middle(box, 20 if roomy or not at else 29, f"rank {rank}" if roomy else str(rank), "words", 600)
    ]
    if roomy and at:
        lines.append(_middle(box, 37, at, "faint", 400))
    return (
        f'<g><title>{escape(told)}</title><rect class="box" x="{box.x:.1f}" y="{box.y:.1f}" '
        f'width="{box.wide:.1f}" height="{TALL:g}" rx="7"/>{"".join(lines)}</g>'
    )


def _legend(placement: Placement, y: float, width: float) -> tuple[list[str], float]:
    """Draw a line per axis and link; returns the elements and the y below them."""
    parts = []
    for talk in placement.talks:
        parts.append(
            f"<line {_look(ink_of(talk.axis), talk.crosses)} "
            f'x1="{MARGIN + 10:g}" x2="{MARGIN + 42:g}" y1="{y - 4:g}" y2="{y - 4:g}"/>'
        )
        parts.append(words_at(MARGIN + 52, y, talk.axis, "words", ' font-weight="600"'))
        x = MARGIN + 82
        for line in wrap_words(groups_words(talk, 6) + link_words(talk), width - MARGIN - x):
            parts.append(words_at(x, y, line, "words"))
            y += 20
    return parts, y + 6


def _zero(placement: Placement, y: float, width: float) -> tuple[list[str], float]:
    """Say what ZeRO shards, and list which elements of each parameter a replica holds."""
    left = MARGIN + 10
    parts = [words_at(left, y + 14, f"what ZeRO-{placement.zero} shards", "words", ' font-weight="600"')]
    words = wrap_words(f"each replica has {held_words(placement)}", width - left - MARGIN)
    parts += [words_at(left, y + 32 + 18 * i, line, "faint") for i, line in enumerate(words)]
    y += 32 + 18 * len(words)
    rows = share_rows(placement)
    if len(rows) > 1:
        table, y = _grid(rows, y + 8, width, len(placement.shares) + 1 - len(rows))
        parts += table
    return parts, y + 20


def _divided(placement: Placement, y: float, width: float) -> tuple[list[str], float]:
    """List what tp and ep divide, one line per layer."""
    layers = divided_layers(placement)
    if not layers:
        return [], y
    some = any(len(held) > 1 for _, held in layers) and not placement.experts  # whose parts are along ep
    heads = [f"tp{i}" for i in range(placement.mesh.tp)] if some else []
    rows = [[divided_heading(placement), *heads], *([name, *held] for name, held in layers[:ROWS])]
    parts, y = _grid(rows, y + 8, width, len(layers) - ROWS)
    return parts, y + 26


def _grid(rows: list[list[str]], y: float, width: float, left_out: int) -> tuple[list[str], float]:
    """Draw a table as words; its first row has the heads. Columns that do not fit follow below the others."""
    left, name = MARGIN + 10, max(len(row[0]) for row in rows[1:]) * 6.8 + 24
    column = max(max(len(part) for row in rows[1:] for part in row[1:]) * 6.6 + 20, 40.0)
    columns, fit = max(map(len, rows)) - 1, max(1, int((width - 40 - name) / column))
    parts = list[str]()
    for first in range(1, columns + 1, fit):
        for number, row in enumerate(rows if first == 1 else [row for row in rows if len(row) > first]):
            parts.append(words_at(left, y, row[0], "words", "" if number else ' font-weight="600"'))
            shown = row[first : first + fit]
            parts += [words_at(left + name + column * i, y, word, "faint") for i, word in enumerate(shown)]
            y += 18
        y += 8
    if left_out > 0:
        parts.append(words_at(left, y - 8, f"and {left_out} more", "faint"))
        y += 18
    return parts, y - 26


def _middle(box: RankBox, down: float, words: str, look: str, weight: int) -> str:
    more = f' text-anchor="middle" font-size="{12 if weight > 400 else 10.5:g}" font-weight="{weight}"'
    return words_at(box.middle, box.y + down, words, look, more)

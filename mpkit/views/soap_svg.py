"""SOAP as SVG: a band a way, and in it the layer's matrices, coloured by who has which part.

words       what is divided, what that is called, and how
matrices    X A + b = Y, a row a position of a sample, and X's samples apart; for a layer norm γ over β
exchange    what ranks send each other, forward and backward, and how far they are from the whole layer
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING

from mpkit.views.colours import INKS, THEMES, Key
from mpkit.views.sheet import MARGIN, heading, keys, sheet
from mpkit.views.units import bytes_text

if TYPE_CHECKING:
    from mpkit.experiments.soap_found import Sent, Soap, Way
    from mpkit.experiments.soap_operator import Box

__all__ = ["soap_svg"]

WIDTH = 1100
RANK_INKS = {"light": ("#0072b2", "#e69f00"), "dark": ("#2f8fd8", "#e69f00")}
BAND, TOP = 136.0, 84.0
MATRICES, EXCHANGE = 304.0, 790.0
"""Where these begin, in pixels from the left."""

CELL, SIDE, APART, GAP = 9.0, 72.0, 4.0, 28.0
"""A number's square; the longest side of a larger matrix; between samples; between matrices."""

SIGNS = {("X", "A"): "·", ("A", "Y"): "=", ("X", "γ"): "→", ("γ", "Y"): "→", ("Y", "C"): "·", ("C", "Z"): "="}
WHERE = {
    ("send", "Y"): [("Y", "C")],
    ("all_gather", "Y"): [("A", "Y")],
    ("all_reduce", "Y"): [("A", "Y")],
    ("all_reduce", "Σx, Σx²"): [("X", "γ")],
}
"""Between which matrices the forward sends something."""

VERBS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "send": "send"}


def soap_svg(found: Soap) -> str:
    """The picture as a standalone SVG document.

    Args:
        found: what to draw.
    """
    title = f"One layer on two ranks: {found.layer}"
    samples, length, features = found.shapes["X"]
    told = f"X: {samples} samples of {length} positions of {features} numbers, a row a position. Numbers of 8 bytes."
    body = [heading(title), f'<text class="faint" x="{MARGIN:g}" y="48">{told}</text>', _both()]
    legend, x = keys((('class="r0"', "rank 0"), ('class="r1"', "rank 1"), (BOTH, "both ranks")), 60)
    body += legend
    body.append(f'<text class="comm" x="{x:g}" y="71" font-size="15" font-weight="700">⇄</text>')
    body.append(f'<text class="words" x="{x + 20:g}" y="70.5">here something is sent</text>')
    for number, way in enumerate(found.ways):
        body.append(_band(found, way, TOP + number * BAND))
    classes = {
        name: {
            **{f"r{rank}": f"fill:{ink}" for rank, ink in enumerate(RANK_INKS[name])},
            "band": f"fill:{ground.idle}",
            "comm": f"fill:{INKS[Key.COMM].light if name == 'light' else INKS[Key.COMM].dark}",
        }
        for name, ground in THEMES.items()
    }
    return sheet("soap", title, str(found), body, WIDTH, TOP + len(found.ways) * BAND + 4, classes=classes)


BOTH, STRIPES = 'fill="url(#mpkit-soap-both)"', 'fill="url(#mpkit-soap-stripes)"'


def _both() -> str:
    """What both ranks have: a number is half of each colour, and a larger area has stripes of both."""
    return (
        '<defs><pattern id="mpkit-soap-both" width="1" height="1" patternContentUnits="objectBoundingBox">'
        '<rect class="r0" width="1" height="1"/><path class="r1" d="M1 0V1H0Z"/></pattern>'
        '<pattern id="mpkit-soap-stripes" width="12" height="12" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="r0" width="12" height="12"/>'
        '<rect class="r1" width="6" height="12"/></pattern></defs>'
    )


def _band(found: Soap, way: Way, y: float) -> str:
    parts = [
        f'<rect class="band" x="{MARGIN / 2:g}" y="{y:g}" width="{WIDTH - MARGIN:g}" height="{BAND - 8:g}" rx="6"/>',
        f'<text class="words" x="{MARGIN + 2:g}" y="{y + 38:g}" font-size="30" font-weight="700">{way.name[0]}</text>',
        f'<text class="words" x="{MARGIN + 36:g}" y="{y + 24:g}" font-size="13" font-weight="600">'
        f"{escape(way.title)}</text>",
    ]
    at = y + 40
    for look, told in (("faint", way.known_as), ("words", way.told)):
        for line in wrap(told, 38):
            parts.append(
                f'<text class="{look}" x="{MARGIN + 36:g}" y="{at:g}" font-size="11">{escape(line)}</text>'
            )
            at += 14
        at += 5
    parts += _matrices(found, way, y + 32)
    parts += _exchange(way, y + 28)
    return f'<g aria-label="{escape(way.name)}: {escape(way.title)}">{"".join(parts)}</g>'


# ---- matrices ------------------------------------------------------------------------------------------------


def _matrices(found: Soap, way: Way, y: float) -> list[str]:
    """Side by side, biases below what they belong to."""
    below = {"A": "b", "γ": "β"}
    order = [name for name in found.shapes if name in way.held and name not in below.values()]
    parts, x = [], MATRICES
    for name, following in pairwise([*order, ""]):
        shape = found.shapes[name]
        drawn, width, bottom = _tensor(name, shape, way.held[name], x, y)
        parts.append(drawn)
        if (bias := below.get(name, "")) in way.held:
            parts.append(_tensor(bias, found.shapes[bias], way.held[bias], x, bottom + 17)[0])
        if sign := SIGNS.get((name, following)):
            middle = f'x="{x + width + GAP / 2:.1f}" text-anchor="middle"'
            parts.append(f'<text class="words" {middle} y="{y + 41:g}" font-size="15">{sign}</text>')
            if any((name, following) in WHERE.get((sent.kind, sent.what), ()) for sent in way.sent):
                parts.append(
                    f'<text class="comm" {middle} y="{y + 26:g}" font-size="15" font-weight="700">⇄</text>'
                )
        x += width + GAP
    return parts


def _tensor(
    name: str, shape: tuple[int, ...], held: list[Box | None], x: float, y: float
) -> tuple[str, float, float]:
    """A tensor as a matrix, with its name above; how wide it is, and where it ends."""
    *lead, columns = shape
    samples, rows = (lead[0], lead[1]) if len(lead) == 2 else (1, lead[0] if lead else 1)
    across = min(CELL, SIDE / columns)
    down = min(CELL, SIDE / (samples * rows))
    each = across == CELL == down  # else there are too many to draw each
    apart = APART if samples <= 8 else 0.0
    both = BOTH if each else STRIPES
    size = f"{samples * rows} × {columns}" if len(shape) > 1 else f"{columns}"
    parts = [
        f'<text class="words" x="{x:g}" y="{y - 5:g}" font-size="12" font-style="italic">{name}'
        f'<tspan class="faint" dx="5" font-size="10" font-style="normal">{size}</tspan></text>'
    ]
    boxes = [None if box is None else _filled(box) for box in held]
    for sample in range(samples):
        top = y + sample * (rows * down + apart)
        row_edges = _edges([box[1] for box in boxes if box], rows, each)
        column_edges = _edges([box[2] for box in boxes if box], columns, each)
        for (r, r_end), (c, c_end) in ((r, c) for r in row_edges for c in column_edges):
            holders = [rank for rank, box in enumerate(boxes) if box and _has(box, (sample, r, c))]
            look = both if len(holders) > 1 else f'class="r{holders[0]}"' if holders else 'class="faint"'
            wide, tall = (c_end - c) * across, (r_end - r) * down
            parts.append(
                f'<rect {look} x="{x + c * across:.2f}" y="{top + r * down:.2f}" '
                f'width="{wide - min(0.9, 0.1 * wide):.2f}" height="{tall - min(0.9, 0.1 * tall):.2f}"/>'
            )
    owners = ", ".join(f"rank {rank}: {_words(box)}" for rank, box in enumerate(held))
    told = f"<title>{escape(f'{name} {list(shape)}; {owners}')}</title>"
    bottom = y + samples * rows * down + (samples - 1) * apart
    return f"<g>{told}{''.join(parts)}</g>", columns * across, bottom


def _filled(box: Box) -> Box:
    """A box of three dimensions."""
    return ((0, 1),) * (3 - len(box)) + box


def _has(box: Box, at: tuple[int, int, int]) -> bool:
    return all(start <= place < end for (start, end), place in zip(box, at, strict=True))


def _edges(ranges: list[tuple[int, int]], size: int, each: bool) -> list[tuple[int, int]]:
    """The pieces that a dimension is drawn in: every number, or of many the parts that ranks have."""
    edges = range(size + 1) if each else sorted({0, size, *(edge for pair in ranges for edge in pair)})
    return list(pairwise(edges))


def _words(box: Box | None) -> str:
    return "none" if box is None else "[" + ", ".join(f"{start}:{end}" for start, end in box) + "]"


# ---- exchange ------------------------------------------------------------------------------------------------


def _exchange(way: Way, y: float) -> list[str]:
    """By phase what is sent; below it how near to the whole layer the ranks come."""
    parts = []
    for phase in ("forward", "backward"):
        parts.append(f'<text class="faint" x="{EXCHANGE:g}" y="{y:g}">{phase}</text>')
        sent = [each for each in way.sent if each.phase == phase]
        words = "; ".join(map(_sent, sent)) if sent else "nothing is sent"
        look = 'class="words" font-weight="600"' if sent else 'class="faint"'
        parts.append(f'<text {look} x="{EXCHANGE + 84:g}" y="{y:g}">{escape(words)}</text>')
        if sent:
            parts.append(
                f'<text class="comm" x="{EXCHANGE + 64:g}" y="{y + 1:g}" font-size="15" font-weight="700">⇄</text>'
            )
        y += 20
    for what, apart in (("output", way.difference), ("gradients", way.gradient_difference)):
        y += 18
        words = "equal to the whole layer's" if apart == 0 else f"within {apart:.0e} of the whole layer's"
        parts.append(
            f'<text class="faint" x="{EXCHANGE:g}" y="{y:g}" font-size="11">{what}</text>'
            f'<text class="words" x="{EXCHANGE + 84:g}" y="{y:g}" font-size="11">{words}</text>'
        )
    return parts


def _sent(sent: Sent) -> str:
    times = f" in {sent.times} messages" if sent.times > 1 else ""
    return f"{VERBS[sent.kind]} {sent.what}: {bytes_text(sent.payload)}{times}"

"""SOAP as SVG: a band per way, and in it the layer's matrices, coloured by which rank has which part.

words       what is divided, what that is called, and how
matrices    X A + b = Y, a row per position of a sample, and X's samples apart; for a layer norm γ over β
exchange    what ranks send each other, forward and backward, and how far they are from the whole layer
"""

from __future__ import annotations

from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING

from examples.flexflow.matrix_svg import BOTH, both_ranks, matrix, rank_classes
from mpkit.common.safe_text import escape
from mpkit.common.units import bytes_text
from mpkit.views.drawing.sheet import keys, sheet
from mpkit.views.theme import MARGIN, THEMES

if TYPE_CHECKING:
    from examples.flexflow.soap_found import PhaseTraffic, Soap, Way

__all__ = ["soap_svg"]

WIDTH = 1100
BAND, TOP = 136.0, 84.0
MATRICES, EXCHANGE = 304.0, 790.0
"""The x in pixels at which each of these begins."""

GAP = 28.0
"""Pixels between matrices."""

SIGNS = {("X", "A"): "·", ("A", "Y"): "=", ("X", "γ"): "→", ("γ", "Y"): "→", ("Y", "C"): "·", ("C", "Z"): "="}
WHERE = {
    ("send", "Y"): [("Y", "C")],
    ("all_gather", "Y"): [("A", "Y")],
    ("all_reduce", "Y"): [("A", "Y")],
    ("all_reduce", "Σx, Σx²"): [("X", "γ")],
}
"""By kind and tensor of what the forward sends, the matrices between which it is sent."""

VERBS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "send": "send"}


def soap_svg(soap: Soap) -> str:
    """Draw the picture as a standalone SVG document.

    Args:
        found: what to draw.
    """
    title = f"One layer on two ranks: {soap.layer}"
    samples, length, features = soap.shapes["X"]
    told = f"X: {samples} samples of {length} positions of {features} numbers, a row a position. Numbers of 8 bytes."
    legend = keys((('class="r0"', "rank 0"), ('class="r1"', "rank 1"), (BOTH, "both ranks")), 60, WIDTH)
    body, x = [both_ranks(), *legend.parts], legend.x
    body.append(f'<text class="comm" x="{x:g}" y="71" font-size="15" font-weight="700">⇄</text>')
    body.append(f'<text class="words" x="{x + 20:g}" y="70.5">here something is sent</text>')
    for number, way in enumerate(soap.ways):
        body.append(_band(soap, way, TOP + number * BAND))
    inks = rank_classes()
    classes = {name: {**inks[name], "band": f"fill:{ground.idle}"} for name, ground in THEMES.items()}
    height = TOP + len(soap.ways) * BAND + 4
    return sheet("soap", title, str(soap), body, WIDTH, height, head=title, below=told, classes=classes)


def _band(soap: Soap, way: Way, y: float) -> str:
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
    parts += _matrices(soap, way, y + 32)
    parts += _exchange(way, y + 28)
    return f'<g aria-label="{escape(way.name)}: {escape(way.title)}">{"".join(parts)}</g>'


# ---- matrices ------------------------------------------------------------------------------------------------


def _matrices(soap: Soap, way: Way, y: float) -> list[str]:
    """Draw the matrices side by side, biases below their weights."""
    below = {"A": "b", "γ": "β"}
    order = [name for name in soap.shapes if name in way.held and name not in below.values()]
    parts, x = [], MATRICES
    for name, following in pairwise([*order, ""]):
        shape = soap.shapes[name]
        drawn, width, bottom = matrix(name, shape, way.held[name], x, y)
        parts.append(drawn)
        if (bias := below.get(name, "")) in way.held:
            parts.append(matrix(bias, soap.shapes[bias], way.held[bias], x, bottom + 17)[0])
        if sign := SIGNS.get((name, following)):
            middle = f'x="{x + width + GAP / 2:.1f}" text-anchor="middle"'
            parts.append(f'<text class="words" {middle} y="{y + 41:g}" font-size="15">{sign}</text>')
            if any((name, following) in WHERE.get((sent.kind, sent.what), ()) for sent in way.sent):
                parts.append(
                    f'<text class="comm" {middle} y="{y + 26:g}" font-size="15" font-weight="700">⇄</text>'
                )
        x += width + GAP
    return parts


# ---- exchange ------------------------------------------------------------------------------------------------


def _exchange(way: Way, y: float) -> list[str]:
    """List by phase what is sent; below it, how near to the whole layer the ranks come."""
    parts = []
    for phase in ("forward", "backward"):
        parts.append(f'<text class="faint" x="{EXCHANGE:g}" y="{y:g}">{phase}</text>')
        sent = [each for each in way.sent if each.phase == phase]
        words = "; ".join(map(_describe_sent, sent)) if sent else "nothing is sent"
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


def _describe_sent(sent: PhaseTraffic) -> str:
    times = f" in {sent.times} messages" if sent.times > 1 else ""
    return f"{VERBS[sent.kind]} {sent.what}: {bytes_text(sent.payload)}{times}"

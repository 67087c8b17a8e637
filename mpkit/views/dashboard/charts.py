"""The loss and logged metrics over the steps, as SVG: small panels with axes, one per metric.

What is measured in training and in evaluation shares a panel: "loss" and "eval loss", "accuracy" and "eval accuracy".
A metric that several ranks logged with different values has a line for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpkit.common.safe_text import escape
from mpkit.trace.metrics import Metrics
from mpkit.views.drawing.colours import INKS, Key
from mpkit.views.drawing.sheet import sheet
from mpkit.views.theme import MARGIN, THEMES

__all__ = ["charts_svg", "round_steps"]

PANEL, GAP, LEFT, HEAD, FOOT = 110.0, 22.0, 46.0, 20.0, 30.0
ACROSS, MOST, POINTS = 3, 12, 300
Scale = Callable[[float], float]
LINES = (Key.FORWARD, Key.INPUT_GRAD, Key.OPTIMIZER, Key.COMM, Key.DATA, Key.COMPUTE)
"""The colours of a panel's lines."""


@dataclass
class Panel:
    """One chart.

    Attributes:
        name: what the values are.
        lines: values by step, by the name of the line.
    """

    name: str
    lines: dict[str, dict[int, float]]


def panels_of(losses: Sequence[float], first_step: int, metrics: Metrics) -> list[Panel]:
    """Return the charts: the loss first, then metrics in the order in which they were logged."""
    panels: dict[str, Panel] = {}
    if losses:
        panels["loss"] = Panel("loss", {"loss": dict(enumerate(losses, first_step))})
    for name in metrics:
        base = name.removeprefix("eval ")
        panel = panels.setdefault(base, Panel(base, {}))
        by_rank = metrics.by_rank(name)
        if len({tuple(values.items()) for values in by_rank.values()}) == 1:
            panel.lines[name] = next(iter(by_rank.values()))
        else:
            panel.lines |= {f"{name}, rank {rank}": values for rank, values in by_rank.items()}
    return list(panels.values())


def charts_svg(
    losses: Sequence[float], first_step: int, metrics: Metrics, width: int = 960, *, theme: str = "auto"
) -> str:
    """Draw the loss and the metrics as a standalone SVG document; "" if there is too little to draw.

    Args:
        losses: the loss of each step.
        first_step: the number of the first of them.
        metrics: what was logged.
        width: in pixels.
        theme: as in `sheet`.
    """
    panels = panels_of(losses, first_step, metrics)
    if not metrics and len(losses) < 3:
        return ""
    shown = panels[:MOST]
    across = max(1, min(ACROSS, len(shown), int(width / 280)))
    each = (width - 2 * MARGIN - (across - 1) * GAP) / across
    body = []
    for i, panel in enumerate(shown):
        x = MARGIN + i % across * (each + GAP)
        y = MARGIN + i // across * (HEAD + PANEL + FOOT)
        body.append(_draw_panel(panel, x, y, each))
    height = MARGIN + -(-len(shown) // across) * (HEAD + PANEL + FOOT) + 4
    if len(panels) > len(shown):
        more = ", ".join(panel.name for panel in panels[MOST:])
        body.append(
            f'<text class="faint" x="{MARGIN:g}" y="{height + 6:g}">{escape(f"not drawn: {more}"[:140])}</text>'
        )
        height += 16
    told = "; ".join(
        f"{name} is {_number(values[max(values)])} after step {max(values)}"
        for panel in shown
        for name, values in panel.lines.items()
    )
    return sheet(
        "charts", "Loss and metrics by step", told, body, width, height, theme=theme, classes=_classes()
    )


def _classes() -> dict[str, dict[str, str]]:
    def look(name: str, key: Key) -> str:
        ink = INKS[key].light if name == "light" else INKS[key].dark
        return f"stroke:{ink};fill:{ink}"

    return {name: {f"l{i}": look(name, key) for i, key in enumerate(LINES)} for name in THEMES}


def _draw_panel(panel: Panel, x: float, y: float, width: float) -> str:
    """Draw one panel with its axes, its upper left corner at (x, y)."""
    finite = [v for values in panel.lines.values() for v in values.values() if math.isfinite(v)]
    steps = [step for values in panel.lines.values() for step in values]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if low == high:
        pad = abs(low) / 2 or 0.5
        low, high = low - pad, high + pad
    first, last = min(steps), max(max(steps), min(steps) + 1)
    left, right, top, base = x + LEFT, x + width, y + HEAD, y + HEAD + PANEL

    def x_of(step: float) -> float:
        return left + (step - first) / (last - first) * (right - left)

    def y_of(value: float) -> float:
        return base - 4 - (value - low) / (high - low) * (PANEL - 8)

    parts = [
        f'<line class="line" x1="{left:g}" x2="{left:g}" y1="{top:g}" y2="{base:g}"/>',
        f'<line class="line" x1="{left:g}" x2="{right:g}" y1="{base:g}" y2="{base:g}"/>',
    ]
    for value in round_steps(low, high, 4):
        parts.append(
            f'<line class="line" x1="{left - 4:g}" x2="{right:g}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}" '
            'stroke-opacity="0.5"/>'
            f'<text class="faint" x="{left - 7:g}" y="{y_of(value) + 4:.1f}" text-anchor="end" font-size="11">'
            f"{_number(value)}</text>"
        )
    for step in (each for each in round_steps(first, last, max(2, int(width / 70))) if each == int(each)):
        parts.append(
            f'<text class="faint" x="{x_of(step):.1f}" y="{base + 13:g}" text-anchor="middle" font-size="11">'
            f"{step:g}</text>"
        )
    parts.append(
        f'<text class="faint" x="{right:g}" y="{base + 25:g}" text-anchor="end" font-size="11">step</text>'
    )
    parts += _lines(panel, x_of, y_of)
    parts.append(_heading(panel, x, y + 12))
    return f'<g aria-label="{escape(panel.name)}">{"".join(parts)}</g>'


def _lines(panel: Panel, across: Scale, up: Scale) -> list[str]:
    drawn = []
    for i, values in enumerate(panel.lines.values()):
        points = [(step, value) for step, value in sorted(values.items()) if math.isfinite(value)]
        points = points[:: max(1, len(points) // POINTS)] + points[-1:]
        look = f'class="l{i % len(LINES)}"'
        path = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in points)
        drawn.append(f'<polyline {look} points="{path}" style="fill:none" stroke-width="1.6"/>')
        if len(points) <= 40:
            drawn += [
                f'<circle {look} cx="{across(s):.1f}" cy="{up(v):.1f}" r="2"/>'
                for s, v in dict(points).items()
            ]
    return drawn


def _heading(panel: Panel, x: float, y: float) -> str:
    """Draw the name of each line in its colour, and its latest value."""
    spans = []
    for i, (name, values) in enumerate(panel.lines.items()):
        latest = _number(values[max(values)])
        if i:  # the rank is enough once the name was said
            name = name.removeprefix(f"{panel.name}, ")
        spans.append(
            f'<tspan class="l{i % len(LINES)}" style="stroke:none">&#9632; </tspan>{escape(name)} '
            f'<tspan font-weight="600">{latest}</tspan>&#160;&#160;'
        )
        if i == 3 and len(panel.lines) > 4:
            spans.append(f"and {len(panel.lines) - 4} more")
            break
    return f'<text class="words" x="{x:g}" y="{y:g}">{"".join(spans)}</text>'


def round_steps(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` + 1 round numbers from `low` to `high`, 1, 2 or 5 x a power of ten apart.

    >>> round_steps(0.13, 0.61, 4), round_steps(0, 7, 4)
    ([0.2, 0.4, 0.6], [0, 2, 4, 6])
    """
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return []
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= span * (1 - 1e-9))
    return [
        round(i * step, 12) if step < 1 else int(i * step)
        for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.4g}"

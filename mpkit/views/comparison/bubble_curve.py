"""The bubble against the number of micro-batches, as text, and as SVG: points on the formula's line."""

from __future__ import annotations

from mpkit.common.safe_text import escape
from mpkit.common.units import percent, seconds
from mpkit.prediction.experiments.compare_bubbles import BubbleCurve
from mpkit.views.drawing.colours import INKS, Key
from mpkit.views.drawing.sheet import sheet
from mpkit.views.drawing.ticks import levels
from mpkit.views.theme import MARGIN, THEMES

__all__ = ["bubble_curve_svg", "bubble_curve_text"]

TOP, PLOT, FOOT, LEFT = 70.0, 240.0, 48.0, 58.0


def bubble_curve_text(curve: BubbleCurve) -> str:
    """Return the table; "-" stands where there is no formula."""
    lines = [f"{_title(curve)}", f"{'micro-batches':>13}{'formula':>10}{'bubble':>10}{'step time':>12}"]
    for point in curve.points:
        formula = "-" if point.formula is None else percent(point.formula)
        lines.append(
            f"{point.microbatches:13}{formula:>10}{percent(point.bubble):>10}{seconds(point.step_time):>12}"
        )
    return "\n".join(lines)


def bubble_curve_svg(curve: BubbleCurve, width: int = 860) -> str:
    """Draw the chart as a standalone SVG document.

    Args:
        curve: what to draw.
        width: in pixels.
    """
    most = max(point.microbatches for point in curve.points)
    last = most + max(2, most // 3)
    left, right, base = MARGIN + LEFT, width - MARGIN, TOP + PLOT

    def x_of(m: float) -> float:
        return left + (m - 1) / (last - 1) * (right - left - 12) + 6

    def y_of(share: float) -> float:
        return base - share * PLOT

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line class="line" x1="{left:g}" x2="{right:g}" y1="{y_of(share):g}" y2="{y_of(share):g}"/>'
            f'<text class="faint" x="{left - 8:g}" y="{y_of(share) + 4:g}" text-anchor="end">{100 * share:.0f} %</text>'
        )
    for m in dict.fromkeys(
        [1, *(int(level) for level in levels(last, 8) if level >= 1 and level == int(level))]
    ):
        parts.append(
            f'<text class="faint" x="{x_of(m):.1f}" y="{base + 18:g}" text-anchor="middle">{m}</text>'
        )
    parts.append(
        f'<text class="faint" x="{(left + right) / 2:g}" y="{base + 38:g}" text-anchor="middle">'
        "number of micro-batches m</text>"
        f'<text class="faint" x="{MARGIN:g}" y="{TOP - 12:g}">bubble: idle share of a step</text>'
    )
    line = [(m, value) for m in range(1, last + 1) if (value := curve.formula(m)) is not None]
    if line:
        path = " ".join(f"{x_of(m):.1f},{y_of(value):.1f}" for m, value in line)
        parts.append(f'<polyline class="formula" points="{path}" style="fill:none" stroke-width="2"/>')
    for point in curve.points:
        told = f"m = {point.microbatches}: bubble {percent(point.bubble)}"
        parts.append(
            f'<circle class="point" cx="{x_of(point.microbatches):.1f}" cy="{y_of(point.bubble):.1f}" r="6">'
            f"<title>{escape(told)}</title></circle>"
        )
    parts.append(_legend(right, bool(line)))
    return sheet(
        "bubble-curve", _title(curve), bubble_curve_text(curve), parts, width, base + FOOT,
        head=_title(curve).capitalize(), classes=_classes(),
    )  # fmt: skip


def _title(curve: BubbleCurve) -> str:
    plan = curve.plan
    name = plan.schedule if isinstance(plan.schedule, str) else plan.schedule.name
    return f"bubble by micro-batches: {name}, {plan.pp * plan.virtual_stages} stages"


def _legend(right: float, has_formula: bool) -> str:
    y, x = TOP - 16, right - 190
    line = (
        f'<line class="formula" x1="{x:g}" x2="{x + 22:g}" y1="{y:g}" y2="{y:g}" stroke-width="2"/>'
        f'<text class="words" x="{x + 28:g}" y="{y + 4:g}">formula</text>'
    )
    return (line if has_formula else "") + (
        f'<circle class="point" cx="{x + 110:g}" cy="{y:g}" r="5"/>'
        f'<text class="words" x="{x + 122:g}" y="{y + 4:g}">runs</text>'
    )


def _classes() -> dict[str, dict[str, str]]:
    def look(name: str) -> dict[str, str]:
        line, point = (
            INKS[key].light if name == "light" else INKS[key].dark for key in (Key.FORWARD, Key.BACKWARD)
        )
        return {"formula": f"stroke:{line}", "point": f"fill:{point};stroke:{THEMES[name].text}"}

    return {name: look(name) for name in THEMES}

"""The load of experts: a table of the last step, and a heatmap per layer of all steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.views.drawing.axes import ink_of, tint
from mpkit.views.drawing.sheet import sheet
from mpkit.views.theme import MARGIN

if TYPE_CHECKING:
    from mpkit.trace.expert_load import ExpertLoad, Rows

__all__ = ["load_svg", "load_text"]

TOP, LABEL, GAP, TALLEST, WIDEST, PANEL = 44.0, 30.0, 40.0, 16.0, 24.0, 132.0
BLOCKS = " ▁▂▃▄▅▆▇█"


def load_text(load: ExpertLoad) -> str:
    """Return a line per layer: its experts' shares of the last step's rows as blocks, and the busiest beside the mean.

    Args:
        load: what to show.
    """
    wide = max(map(len, load.rows))
    lines = [f"Rows by expert in step {load.first + _steps(load) - 1}; a full block is the busiest expert's"]
    for layer, rows in load.rows.items():
        last = rows[-1]
        blocks = "".join(BLOCKS[round(8 * value / max(last.max(), 1.0))] for value in last)
        unused = int((last == 0).sum())
        told = f"busiest {load.imbalance(layer)[-1]:.2f} x mean" + (
            f", {unused} without rows" if unused else ""
        )
        if layer in load.dropped:
            told += (
                f", {load.dropped[layer][-1] / max(1.0, load.dropped[layer][-1] + last.sum()):.0%} dropped"
            )
        lines.append(f"{layer.ljust(wide)}  {blocks}  {told}")
    return "\n".join(lines)


def load_svg(load: ExpertLoad, width: int = 960) -> str:
    """Draw a heatmap per layer, a row per expert and a column per step: the stronger, the more rows than the mean.

    Args:
        load: what to draw.
        width: in pixels.
    """
    panels, y = [], TOP
    for layer, rows in load.rows.items():
        panel, tall = _panel(load, layer, rows, y, width)
        panels.append(panel)
        y += tall + GAP
    steps = _steps(load)
    last = load.first + steps - 1
    note = f"row: an expert; column: a step, {load.first} to {last}; pale: no row, strong: twice the mean"
    title = "Rows by expert and step"
    return sheet("experts", title, str(load), panels, width, y - 18, head=title, foot=note)


def _steps(load: ExpertLoad) -> int:
    return len(next(iter(load.rows.values())))


def _panel(load: ExpertLoad, layer: str, rows: Rows, y: float, width: int) -> tuple[str, float]:
    """Draw one layer; return its height too."""
    steps, experts = rows.shape
    tall, wide = min(TALLEST, PANEL / experts), min(WIDEST, (width - 2 * MARGIN - LABEL) / steps)
    mean = rows.mean(axis=1, keepdims=True).clip(min=1e-300)
    top, left = y + 22, MARGIN + LABEL
    worst = load.imbalance(layer)
    parts = [
        f'<text class="words" x="{MARGIN:g}" y="{y + 12:g}"><tspan font-weight="600">{escape(layer)}</tspan>'
        f'<tspan class="faint" dx="8">busiest {worst[0]:.2f} x mean at first, {worst[-1]:.2f} x now</tspan></text>'
    ]
    for expert in range(experts):
        if tall >= 10:
            at = top + tall * (expert + 0.5) + 4
            parts.append(
                f'<text class="faint" font-size="10" x="{left - 6:g}" y="{at:.1f}" text-anchor="end">{expert}</text>'
            )
        for step in range(steps):
            told = f"step {load.first + step}, expert {expert}: {rows[step, expert]:.0f} rows"
            fill = tint(ink_of("ep"), float(rows[step, expert] / mean[step, 0]) / 2)
            parts.append(
                f'<rect fill="{fill}" x="{left + wide * step:.2f}" y="{top + tall * expert:.2f}" '
                f'width="{max(wide - 0.5, 0.5):.2f}" height="{max(tall - 0.5, 0.5):.2f}"><title>{told}</title></rect>'
            )
    return f'<g aria-label="{escape(layer)}">{"".join(parts)}</g>', 22 + tall * experts

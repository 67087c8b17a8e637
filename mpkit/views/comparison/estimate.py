"""An estimate as a picture: the step with its band, where its time goes, and the memory of each stage's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.common.units import percent, seconds
from mpkit.views.drawing.sheet import keys, sheet
from mpkit.views.memory.fits import FITS_CLASSES, memory_bars
from mpkit.views.theme import MARGIN, REST, SERIES, THEMES

if TYPE_CHECKING:
    from mpkit.prediction.cost_model.estimate import Estimate

__all__ = ["estimate_svg"]

TOP, BAR = 70.0, 22.0


def estimate_svg(estimate: Estimate, width: int = 960) -> str:
    """Draw an estimate as a standalone SVG document.

    Args:
        estimate: what to draw.
        width: in pixels.
    """
    low, high = estimate.band
    name = estimate.model.name or "The model"
    title = (
        f"{name} {estimate.verdict} {estimate.hardware.name}: {seconds(estimate.step_time)} per step"
        f"{'' if estimate else ', if it had the memory'}"
    )
    remedy = estimate.remedy_words.replace("\n ", "")
    told = (
        f"{seconds(low)} to {seconds(high)} ({estimate.origin}); {estimate.tokens_per_second:,.0f} tokens/s, "
        f"{estimate.tflops_per_gpu:.0f} TFLOP/s per device, MFU {percent(estimate.mfu)}; {estimate.plan!r}. {remedy}"
    )
    causes, below = _causes(estimate, width)
    memory, bottom = memory_bars(estimate, below + 26, width)
    parts = [*causes, *memory]
    classes = {theme: {**FITS_CLASSES[theme], **_rules()} for theme in THEMES}
    return sheet(
        "estimate", title, str(estimate), parts, width, bottom, head=title, below=told, classes=classes
    )


def _rules() -> dict[str, str]:
    return {f"c{i}": f"fill:{ink}" for i, ink in enumerate((*SERIES, REST))}


def _causes(estimate: Estimate, width: float) -> tuple[list[str], float]:
    """Draw one bar of the step's time by cause, and its legend; return the elements, and the y below them."""
    listed = list(estimate.because.items())
    shown = [*listed[: len(SERIES)]]
    if rest := sum(time for _, time in listed[len(SERIES) :]):
        shown.append(("other", rest))
    whole = sum(time for _, time in listed) or 1.0
    parts, x, legend = [], MARGIN, []
    for i, (cause, time) in enumerate(shown):
        wide = (width - 2 * MARGIN) * time / whole
        words = f"{cause} {seconds(time)}, {percent(time / estimate.step_time)}"
        parts.append(
            f'<rect class="c{i}" x="{x:.1f}" y="{TOP:g}" width="{wide:.1f}" height="{BAR:g}">'
            f"<title>{escape(words)}</title></rect>"
        )
        x += wide
        legend.append((f'class="c{i}"', words))
    lines = keys(legend, TOP + BAR + 12, width)
    return [*parts, *lines.parts], lines.y + 20

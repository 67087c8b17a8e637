"""An estimate as a picture: the step with its band, where its time goes, and the memory of each stage's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.common.units import percent, seconds
from mpkit.prediction.cost_model.fits import Fits
from mpkit.views.drawing.colours import THEMES
from mpkit.views.drawing.sheet import MARGIN, heading, sheet
from mpkit.views.memory.fits import FITS_CLASSES, memory_bars

if TYPE_CHECKING:
    from mpkit.prediction.cost_model.estimate import Estimate

__all__ = ["estimate_svg", "estimate_text"]

INKS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
REST = "#8a8f98"
TOP, BAR = 70.0, 22.0


def estimate_text(estimate: Estimate) -> str:
    """Return the estimate in words."""
    return str(estimate)


def estimate_svg(estimate: Estimate, width: int = 960) -> str:
    """Draw an estimate as a standalone SVG document.

    Args:
        estimate: what to draw.
        width: in pixels.
    """
    low, high = estimate.band
    name = estimate.model.name or "The model"
    title = f"{name} on {estimate.hardware.name}: {seconds(estimate.step_time)} per step"
    told = (
        f"{seconds(low)} to {seconds(high)}; {estimate.tokens_per_second:,.0f} tokens/s, "
        f"{estimate.tflops_per_gpu:.0f} TFLOP/s per device, MFU {percent(estimate.mfu)}; {estimate.plan!r}"
    )
    body = [heading(title), f'<text class="faint" x="{MARGIN:g}" y="48">{escape(told)}</text>']
    causes, below = _causes(estimate, width)
    memory, bottom = memory_bars(Fits(estimate), below + 26, width)
    parts = [*body, *causes, *memory]
    classes = {theme: {**FITS_CLASSES[theme], **_rules()} for theme in THEMES}
    return sheet("estimate", title, str(estimate), parts, width, bottom, classes=classes)


def _rules() -> dict[str, str]:
    return {f"c{i}": f"fill:{ink}" for i, ink in enumerate((*INKS, REST))}


def _causes(estimate: Estimate, width: float) -> tuple[list[str], float]:
    """Draw one bar of the step's time by cause, and its legend; return the elements, and the y below them."""
    listed = list(estimate.because.items())
    shown = [*listed[: len(INKS)]]
    if rest := sum(time for _, time in listed[len(INKS) :]):
        shown.append(("other", rest))
    whole = sum(time for _, time in listed) or 1.0
    parts, x, key, y = [], MARGIN, MARGIN, TOP + BAR + 12
    for i, (cause, time) in enumerate(shown):
        wide = (width - 2 * MARGIN) * time / whole
        words = f"{cause} {seconds(time)}, {percent(time / estimate.step_time)}"
        parts.append(
            f'<rect class="c{i}" x="{x:.1f}" y="{TOP:g}" width="{wide:.1f}" height="{BAR:g}">'
            f"<title>{escape(words)}</title></rect>"
        )
        x += wide
        room = 20 + 6.8 * len(words) + 14
        if key + room > width - MARGIN and key > MARGIN:
            key, y = MARGIN, y + 20
        parts.append(f'<rect class="c{i}" x="{key:g}" y="{y:g}" width="14" height="12" rx="2"/>')
        parts.append(f'<text class="words" x="{key + 20:g}" y="{y + 10.5:g}">{escape(words)}</text>')
        key += room
    return parts, y + 20

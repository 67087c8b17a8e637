"""Whether a plan fits, as a picture: a stacked bar for a rank of each stage beside the device's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.units import bytes_text
from mpkit.common.visible import escape
from mpkit.prediction.cost_model.fits import MARGIN_WORD, MEANING
from mpkit.prediction.cost_model.memory import CATEGORIES
from mpkit.views.drawing.colours import THEMES
from mpkit.views.drawing.sheet import MARGIN, heading, keys, sheet

if TYPE_CHECKING:
    from mpkit.prediction.cost_model.fits import Fits

__all__ = ["fits_svg", "fits_text"]

ROW, TOP, MOST = 30.0, 50.0, 16
INKS = ("#0072b2", "#e69f00", "#009e73", "#56b4e9", "#cc79a7", "#d55e00", "#f0e442", "#8a8f98")
LIMIT = "#d1242f"


def fits_text(fits: Fits) -> str:
    """Return the answer in words."""
    return fits.describe()


def fits_svg(fits: Fits, width: int = 960) -> str:
    """Draw the answer as a standalone SVG document.

    Args:
        fits: the answer.
        width: in pixels.
    """
    stages = fits.estimate.stage_memory
    shown = stages[:MOST]
    room = width - 2 * MARGIN - 90
    most = max(fits.available, *(sum(memory.values()) + fits.margin(memory) for memory in stages)) * 1.04
    body = [heading(_title(fits), 26)]
    for stage, memory in enumerate(shown):
        body.append(_bar(fits, stage, memory, TOP + stage * ROW, room / most))
    bottom = TOP + len(shown) * ROW
    limit = MARGIN + 80 + fits.available * room / most
    body.append(
        f'<line stroke="{LIMIT}" stroke-width="2.5" x1="{limit:.1f}" x2="{limit:.1f}" y1="{TOP - 8:g}" y2="{bottom:g}">'
        f"<title>the device's memory: {bytes_text(fits.available)}</title></line>"
    )
    looks = [(f'class="f{i}"', name) for i, name in enumerate(CATEGORIES)]
    legend, _ = keys([*looks, ('class="f8"', MARGIN_WORD)], bottom + 14)
    body += legend
    body.append(
        f'<text class="faint" x="{MARGIN:g}" y="{bottom + 46:g}">red line: {bytes_text(fits.available)} of a '
        f"{escape(fits.estimate.hardware.device.name)}</text>"
    )
    colours = {f"f{i}": f"fill:{ink}" for i, ink in enumerate(INKS)} | {"f8": "fill:#8a8f98;opacity:.45"}
    classes = {theme: dict(colours) for theme in THEMES}
    return sheet("fits", _title(fits), fits.describe(), body, width, bottom + 60, classes=classes)


def _title(fits: Fits) -> str:
    name = fits.estimate.model.name or "The model"
    return f"{name} {'fits' if fits else 'does not fit'} {fits.estimate.hardware.name}"


def _bar(fits: Fits, stage: int, memory: dict[str, float], y: float, scale: float) -> str:
    per_stage = fits.estimate.layout.ranks // fits.estimate.layout.pp
    first, last = stage * per_stage, (stage + 1) * per_stage - 1
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    x = MARGIN + 80
    parts = [f'<text class="faint" x="{MARGIN:g}" y="{y + 14:g}">{ranks}</text>']
    pieces = [(i, name, MEANING[name], memory[name]) for i, name in enumerate(CATEGORIES)]
    pieces.append((8, MARGIN_WORD, "what an allocator reserves beside it", fits.margin(memory)))
    for i, name, meaning, nbytes in pieces:
        wide = nbytes * scale
        if wide > 0:
            parts.append(
                f'<rect class="f{i}" x="{x:.1f}" y="{y:g}" width="{wide:.1f}" height="20">'
                f"<title>{name}, {meaning}: {bytes_text(nbytes)}</title></rect>"
            )
            x += wide
    return f'<g aria-label="{ranks}: {bytes_text(sum(memory.values()))}">{"".join(parts)}</g>'

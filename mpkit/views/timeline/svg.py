"""A timeline as one SVG file: for READMEs, saved notebooks and papers.

    title
    rows          one per GPU, its thin rows below it; idle time hatched; above each group of ranks its header
    axis
    legend, and the row of figures: clock, bubble, step time

`static_bundle` is the output where no kernel runs: on GitHub, in a saved notebook, in a terminal. The SVG's size is
bounded by its width: a row with more boxes than pixels is drawn by `coverage`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.display import image
from mpkit.common.safe_text import escape
from mpkit.common.units import percent, seconds
from mpkit.timeline.timeline import Timeline
from mpkit.views.chart.svg import chart_svg
from mpkit.views.drawing.colours import INKS, Key, outline
from mpkit.views.drawing.lanes import FOLDED
from mpkit.views.drawing.sheet import faint_lines, keys, ticks
from mpkit.views.memory.charts import memory_over_time
from mpkit.views.theme import FONT, HEADING, MARGIN, TEXT, THEMES, style_block, wrap_words
from mpkit.views.timeline.picture import Picture, PictureRow, coverage, picture, runs, strongest
from mpkit.views.timeline.stages import bars, chunk_of
from mpkit.views.timeline.text import text
from mpkit.views.timeline.waits_in_vain import vain_svg


def static_bundle(timeline: Timeline, title: str = "", *, memory: bool = False) -> dict[str, str]:
    """Return a MIME bundle of text/plain and text/html; with `memory`, what each rank held is drawn below.

    >>> import mpkit as mk
    >>> sorted(static_bundle(mk.simulate(mk.Plan.gpipe(2, 2))))
    ['text/html', 'text/plain']
    """
    fold = timeline.world_size > FOLDED
    drawn = partial(svg, timeline, title=title, fold=fold)
    shown = image(drawn, summary(picture(timeline, fold=fold)))
    if memory and len(timeline.held):
        chart = memory_over_time(timeline)
        shown += image(partial(chart_svg, chart), f"Memory by GPU over time. {chart.note}")
    return {"text/plain": text(timeline, 100, fold=fold), "text/html": shown}


HEIGHTS = {"compute": 26.0, "layers": 8.0, "comm": 7.0, "host": 5.0, "data": 7.0, "group": 14.0}
GAP, BETWEEN, GUTTER = 2.0, 7.0, 96.0
OUTLINED = {k for k in Key if k and (outline(INKS[k].light, "light") or outline(INKS[k].dark, "dark"))}
"""The keys that are too pale for one of the grounds."""

FULL_DETAIL = 1500
"""The most boxes in the whole picture for which each gets its hover text."""


class Plot(NamedTuple):
    """The x range of the time axis: `span` pixels, from `left` on."""

    left: float
    span: float


Over = Callable[[Picture, list[float], Plot], str]
"""Returns what is drawn over the rows of a picture, given the y of each row and the time axis."""


def gutter_of(pic: Picture) -> float:
    """Return the pixels that the labels take, left of the rows."""
    longest = max((len(row.label) for row in pic.rows if row.part == "compute"), default=0)
    return max(GUTTER, 6.6 * longest + 12)


def svg(timeline: Timeline, width: int = 960, **options: Any) -> str:
    """Draw the timeline as a standalone SVG document; `timeline_svg` has the options."""
    return timeline_svg(timeline, width, **options)[0]


def timeline_svg(
    timeline: Timeline, width: int = 960, *, title: str = "", step: int | None = None, room: float = 0.0,
    fold: bool = False, gutter: float = 0.0, over: Over | None = None,
) -> tuple[str, int]:  # fmt: skip
    """Return the timeline, or one step of it, as SVG, and its height in pixels, for pictures below each other.

    Pictures that share a scale have the same `room`, the least seconds of the axis, and `gutter`, the least pixels for
    the labels. `fold`: draw only the first rank of each group; `over` draws over the rows, such as a critical path.
    """
    if width < 240:
        raise ValueError(f"width={width} leaves no room for a picture: give 240 pixels or more")
    pic = picture(timeline, step, fold=fold)
    pic = replace(pic, duration=max(pic.duration, room))
    across = width - 2 * MARGIN
    head = wrap_words(title, across, HEADING, bold=True)
    top = MARGIN + (10 + 20 * len(head) if head else 4)
    tops, bottom = _tops(pic.rows, top)
    gutter = max(gutter, gutter_of(pic))
    plot = Plot(MARGIN + gutter, width - gutter - 2 * MARGIN)
    body = _heading(head)
    body += [_row(pic, number, tops[number], plot) for number in range(len(pic.rows))]
    body += [vain_svg(pic, tops, plot.left, plot.span, HEIGHTS["compute"])] if pic.waits else []
    body += [_axis(pic, top, bottom, plot)]
    body += [over(pic, tops, plot)] if over is not None else []
    legend, height = _legend(pic, bottom + 38, width)
    caption, height = _caption(pic, height + 24, width)
    notes = faint_lines([line for note in timeline.notes for line in wrap_words(note, across)], height)
    height += 20 * len(notes) - 20 + MARGIN
    ranks = f"{timeline.world_size} rank{'s' * (timeline.world_size != 1)}"
    name = escape(title or f"Timeline of {ranks}")
    drawn = "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mpkit" role="img" width="{width}" '
            f'height="{height:.0f}" viewBox="0 0 {width} {height:.0f}" font-family="{FONT}" font-size="{TEXT}">',
            f"<title>{name}</title>",
            f"<desc>{escape(summary(pic))}</desc>",
            _style(),
            f'<rect class="ground" width="{width}" height="{height:.0f}" rx="8"/>',
            *body,
            legend,
            caption,
            *notes,
            "</svg>",
        ]
    )
    return drawn, round(height)


def summary(pic: Picture) -> str:
    """Describe the picture in words, for readers who cannot see it."""
    facts = [f"{name}: {value}" for name, value in pic.figures.items()]
    computes = [row for row in pic.rows if row.part == "compute"][:64]
    idle = [f"{row.label}: idle {percent(pic.idle_share(row.rank))}" for row in computes]
    vain = [f"rank {wait.rank} {wait.words}" for wait in pic.waits]
    many = f"{len(pic.boxes)} operations in {seconds(pic.duration)}"
    return "; ".join([many, *facts, *idle, *vain]) + "."


def _style() -> str:
    """Return the colours as classes: one block per theme, so that one file serves both."""

    def block(name: str) -> str:
        ground = THEMES[name]
        rules = [
            f".ground{{fill:{ground.ground}}}.words{{fill:{ground.text}}}.faint{{fill:{ground.faint}}}",
            f".path{{fill:none;stroke:{ground.text};stroke-width:1.6}}",
            f".line{{stroke:{ground.line}}}.hatch{{stroke:{ground.hatch}}}.bare{{fill:{ground.idle}}}",
        ]
        for key, ink in INKS.items():
            if key != Key.IDLE:
                fill, on = (ink.light, ink.on_light) if name == "light" else (ink.dark, ink.on_dark)
                rules.append(f".k{int(key)}{{fill:{fill}}}.t{int(key)}{{fill:{on}}}")
                edge = outline(fill, name)
                rules += [f".e{int(key)}{{stroke:{edge};stroke-width:.8}}"] * bool(edge)
        return "".join(f".mpkit {rule}" for rule in "".join(rules).replace("}.", "}\n.").split("\n"))

    hatch = (
        '<defs><pattern id="mpkit-idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="bare" width="6" height="6"/>'
        '<line class="hatch" y2="6" stroke-width="2"/></pattern></defs>'
    )
    return f"<style>{style_block(block)}.mpkit .k0{{fill:url(#mpkit-idle)}}</style>\n{hatch}"


def _tops(rows: list[PictureRow], top: float) -> tuple[list[float], float]:
    """Return the y of each row, and the y below the last."""
    tops = []
    for number, row in enumerate(rows):
        if number:
            heads = row.part == "group" or (row.part == "compute" and rows[number - 1].part != "group")
            top += BETWEEN if heads else GAP
        tops.append(top)
        top += HEIGHTS[row.part]
    return tops, top


def _row(pic: Picture, number: int, y: float, plot: Plot) -> str:
    row, boxes = pic.rows[number], pic.of_row(number)
    height = HEIGHTS[row.part]
    if row.part == "group":
        return _header(row.label, y + height - 3, plot)
    label = _words(plot.left - 10, y + height / 2 + 4, row.label, more=' text-anchor="end"')
    label = label if row.part == "compute" else ""
    few = len(boxes) <= plot.span / 2
    drawn = _each(pic, boxes, y, height, plot) if few else _by_pixel(pic, boxes, y, height, plot)
    return f'<g aria-label="{escape(row.label)}">{label}{drawn}</g>'


def _header(words: str, y: float, plot: Plot) -> str:
    """Draw the header of a group: its name, and a line from there to the end."""
    after = MARGIN + 6.4 * len(words) + 8
    return (
        f'<text class="faint" x="{MARGIN:g}" y="{y:g}" font-size="11" font-weight="600">{escape(words)}</text>'
        f'<line class="line" x1="{after:g}" x2="{plot.left + plot.span:g}" y1="{y - 3.5:g}" y2="{y - 3.5:g}"/>'
    )


def _each(pic: Picture, boxes: Array, y: float, height: float, plot: Plot) -> str:
    """Draw every box as itself, with its number and its hover text."""
    scale = plot.span / pic.duration if pic.duration else 0.0
    parts = []
    for box in boxes:
        x = plot.left + float(box["start"]) * scale
        width = float(box["end"] - box["start"]) * scale
        # Neighbours of one colour are separated by a line in the background's colour.
        shown = max(width - (0.8 if width > 3 and box["key"] else 0.0), 0.3 if height > 20 else 0.8)
        edge = f" e{box['key']}" if width > 3 and height > 5 and box["key"] in OUTLINED else ""
        hover = f"<title>{escape(pic.hover(box))}</title>" if len(pic.boxes) <= FULL_DETAIL else ""
        parts.append(
            f'<rect class="k{box["key"]}{edge}" x="{x:.2f}" y="{y:g}" width="{shown:.2f}" height="{height:g}"'
            + (f">{hover}</rect>" if hover else "/>")
        )
        if height > 20 and width > 4.5 and (chunk := chunk_of(pic.stages, pic.timeline, box)):
            parts.append(bars(chunk, f"t{box['key']}", x, y + height, shown))
        label = pic.label(box)
        if label and height > 20 and width > 7.5 * len(label) + 2:
            parts.append(
                f'<text class="t{box["key"]}" x="{x + width / 2:.2f}" y="{y + height / 2 + 4:g}" '
                f'text-anchor="middle" font-size="11" pointer-events="none">{label}</text>'
            )
    return "".join(parts)


def _by_pixel(pic: Picture, boxes: Array, y: float, height: float, plot: Plot) -> str:
    """Draw the strongest key in each pixel, with runs of equal pixels joined: at most one box per pixel and layer."""
    keys, busy = strongest(coverage(boxes, int(plot.span), pic.duration))
    shade = np.ceil(busy * 4).astype(int)  # in quarters: more would cut runs with no visible gain
    parts = []
    for first, after in runs(np.where(keys >= 0, 0, -1)):
        if keys[first] >= 0 and pic.rows[int(boxes["row"][0])].part == "compute":
            parts.append(_rect(0, plot.left + first, after - first, y, height, 4))
    for first, after in runs(keys * 8 + shade):
        if keys[first] > Key.IDLE:
            shown = int(shade[first])
            parts.append(_rect(int(keys[first]), plot.left + first, after - first, y, height, shown))
    return "".join(parts)


def _rect(key: int, x: float, width: int, y: float, height: float, shade: int) -> str:
    opacity = f' opacity="{shade / 4:g}"' if shade < 4 else ""
    return f'<rect class="k{key}" x="{x:g}" y="{y:g}" width="{width}" height="{height:g}"{opacity}/>'


def _axis(pic: Picture, top: float, bottom: float, plot: Plot) -> str:
    left, span = plot
    scale = span / pic.duration if pic.duration else 0.0
    y = f"{bottom + 6:g}"
    parts = [f'<line class="line" x1="{left:g}" x2="{left + span:g}" y1="{y}" y2="{y}"/>']
    for time, words in ticks(pic.duration, max(2, int(span / 110))):
        x, look = f"{left + time * scale:.1f}", 'text-anchor="middle" font-size="11"'
        parts.append(f'<line class="line" x1="{x}" x2="{x}" y1="{y}" y2="{bottom + 10:g}"/>')
        parts.append(f'<text class="faint" x="{x}" y="{bottom + 22:g}" {look}>{words}</text>')
    for mark in pic.marks if len(pic.marks) <= 40 else []:
        x = f"{left + mark.time * scale:.1f}"
        parts.append(
            f'<line class="line" stroke-dasharray="3 3" x1="{x}" x2="{x}" y1="{top - 4:g}" '
            f'y2="{y}"><title>{escape(mark.text)}</title></line>'
        )
    return "".join(parts)


def _heading(lines: list[str]) -> list[str]:
    look = f' font-size="{HEADING}" font-weight="600"'
    return [_words(MARGIN, MARGIN + 14 + 20 * i, line, more=look) for i, line in enumerate(lines)]


def _words(x: float, y: float, words: str, look: str = "words", more: str = "") -> str:
    return f'<text class="{look}" x="{x:g}" y="{y:g}"{more}>{escape(words)}</text>'


def _legend(pic: Picture, y: float, width: int) -> tuple[str, float]:
    """Draw swatches with their words, on as many lines as they need; returns them and the y of the last line."""
    words = {key: INKS[key].word + " (bubble)" * (key == Key.IDLE) for key in pic.keys}
    looks = [(f'class="k{int(key)} e{int(key)}"', word) for key, word in words.items()]
    legend = keys(looks, y - 1, width, "a bar below: its rank's second stage" if pic.stages else "")
    return "".join(legend.parts), legend.y + 11


def _caption(pic: Picture, y: float, width: int) -> tuple[str, float]:
    """Draw bubble and step time first, then the clock in words; return them and the y of the next line."""
    shown = [f"{name} {pic.figures[name]}" for name in ("bubble", "step time") if name in pic.figures]
    if "hardware" in pic.figures:
        shown.append(f"on {pic.figures['hardware']}")
    strong = " · ".join(shown)
    parts = [_words(MARGIN, y, strong, more=' font-weight="600"')] if strong else []
    x = MARGIN + (7.4 * len(strong) + 14 if strong else 0)
    clock = pic.figures["clock"]
    if x + 6.6 * len(clock) <= width - MARGIN:
        return "".join([*parts, _words(x, y, clock, "faint")]), y + 20
    lines = faint_lines(wrap_words(clock, width - 2 * MARGIN), y + 20 * bool(strong))
    return "".join([*parts, *lines]), y + 20 * (len(lines) + bool(strong))

"""The theme of every figure, page and widget: grounds, fonts, margins, and the colours that stand for no operation.

    SVG       `sheet` and `svg` take classes from `style_block`: light or dark as readers prefer, light on paper
    plotly    `dress_chart` gives a Figure a transparent ground, the font, margins, grid lines and a legend below
    browser   `browser/` has FONT and the names below in place of "$font", "$accent" ...; `look` sends THEMES

What the colours of operations, memory and idle time mean is in `colours`; those of the mesh's axes are in `plan.mesh`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

__all__ = [
    "ACCENT",
    "ALARM",
    "FONT",
    "GREY",
    "HEADING",
    "LINE",
    "MARGIN",
    "MONO",
    "REST",
    "SERIES",
    "STATUS",
    "TEXT",
    "THEMES",
    "WHOLE_WORDS",
    "Theme",
    "dress_chart",
    "page_style",
    "style_block",
    "substitute_theme",
    "wrap_words",
]

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', monospace"
WHOLE_WORDS = "white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
"""The style of preformatted text: lines break between words, where JupyterLab's own break within them."""

TEXT, HEADING = 12, 15
"""Font sizes in pixels."""

MARGIN = 16.0
"""Pixels between a picture's edge and what is drawn."""


@dataclass(frozen=True)
class Theme:
    """The background of the operations, and the text next to them."""

    ground: str
    text: str
    faint: str
    line: str
    idle: str
    hatch: str
    limit: str


THEMES: dict[str, Theme] = {
    "light": Theme("#ffffff", "#1f2328", "#656d76", "#d8dee4", "#f1f3f6", "#c3c9d2", "#d1242f"),
    "dark": Theme("#14171c", "#e6e9ee", "#98a1ad", "#30363d", "#20242b", "#454c57", "#ff7b72"),
}
"""By name. On paper, everything is light."""

GREY, LINE = "#757d88", "rgba(128,128,128,0.25)"  # legible on light and dark grounds
ACCENT, ALARM = "#0072b2", "#d55e00"
STATUS = {"good": "#007a5a", "doubt": "#9a6b00", "bad": "#c23b00", "done": "#656d76"}
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""The colours of series, one after the other: the palette of Okabe and Ito (*Color Universal Design*, 2008)."""
REST = "#8a8f98"
"""What is left, after the series."""


def style_block(block: Callable[[str], str], theme: str = "auto") -> str:
    """Return the rules of a theme; of "auto" the light ones, and the dark ones for screens whose reader prefers them.

    >>> style_block(lambda name: f".ground{{fill:{THEMES[name].ground}}}", "dark")
    '.ground{fill:#14171c}'
    >>> style_block("{}".format)
    'light@media screen and (prefers-color-scheme: dark){dark}'

    Args:
        block: the rules by the theme's name.
        theme: "light", "dark" or "auto".
    """
    if theme != "auto":
        return block(theme)
    return f"{block('light')}@media screen and (prefers-color-scheme: dark){{{block('dark')}}}"


def page_style() -> str:
    """Return the rules of a plain page of text: width, font, and ground, text and lines in light and dark.

    Lines and faint text have the names that JupyterLab has for them, so that HTML for cells looks the same here.
    """

    def ground(name: str) -> str:
        theme = THEMES[name]
        names = f"--jp-ui-font-color2:{theme.faint};--jp-border-color2:{theme.line}"
        return f":root{{color-scheme:{name};{names}}}body{{background:{theme.ground};color:{theme.text}}}"

    return f"body{{font:15px/1.5 {FONT};max-width:980px;margin:2em auto;padding:0 1em}}{style_block(ground)}"


def substitute_theme(text: str) -> str:
    """Put the theme into a file of the browser's half: "$font", "$mono", "$accent", "$alarm" and "$done".

    >>> substitute_theme("color: $accent")
    'color: #0072b2'
    """
    values = {"font": FONT, "mono": MONO, "accent": ACCENT, "alarm": ALARM, "done": STATUS["done"]}
    for name, value in values.items():
        text = text.replace(f"${name}", value)
    return text


def wrap_words(words: str, width: float, size: float = TEXT, *, bold: bool = False) -> list[str]:
    """Break words into lines that fit a width.

    >>> wrap_words("one two three four", 60)
    ['one two', 'three', 'four']

    Args:
        words: the text; [] is returned for "".
        width: in pixels.
        size: of the font, in pixels.
        bold: whether the letters are heavy, which are wider.
    """
    letter = (0.62 if bold else 0.56) * size
    return wrap(words, max(int(width / letter), 8))


TITLE = 44
"""Letters of a chart's title per line: as many as fit the narrowest column, 400 pixels."""


def dress_chart(
    figure: Any, title: str = "", height: int = 360, *, left: int = 64, above: int = 0, below: int = 52, **layout: Any
) -> Any:  # fmt: skip
    """Give a plotly Figure the theme, and return it.

    Its legend is a line below it, which breaks where the column ends, so that narrow charts keep their width.

    Args:
        figure: what to dress.
        title: its heading; it breaks after 44 letters.
        height: in pixels; each further line of the title adds to it.
        left, above, below: margins in pixels, `above` beside the title.
        layout: further arguments of `update_layout`.
    """
    lines = wrap(title, TITLE)
    tall = 20 * max(len(lines) - 1, 0)
    top = 48 * bool(lines) + above
    under = -(below + 4) / max(height - top - below, 1)  # in heights of the plot: below the axis' title
    legend = {"orientation": "h", "x": 0, "y": under, "yanchor": "top", "traceorder": "normal"}
    figure.update_layout(
        title={"text": "<br>".join(lines), "font": {"size": HEADING}, "x": 0, "xanchor": "left", "pad": {"l": 8}},
        height=height + tall, margin={"l": left, "r": 16, "t": top + tall, "b": below},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "color": GREY, "size": TEXT},
        hoverlabel={"font": {"color": THEMES["light"].text}, "bgcolor": THEMES["light"].ground},
        **{"legend": legend, **layout},
    )  # fmt: skip
    axis = {"gridcolor": LINE, "zeroline": False, "automargin": True}
    return figure.update_xaxes(**axis).update_yaxes(**axis)

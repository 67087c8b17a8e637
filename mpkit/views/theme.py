"""The theme of every figure, page and widget: grounds, fonts, margins, and the colours that stand for no operation.

    SVG       `sheet` and `svg` take classes from `style_block`: light or dark as readers prefer, light on paper
    plotly    `chart/figure.py` gives a Figure a transparent ground, the font, grid lines and a legend below
    browser   `browser/` has FONT and the names below in place of "$font", "$accent" ...; `look` sends THEMES

What the colours of operations, memory and idle time mean is in `colours`; those of the mesh's axes are in `plan.mesh`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap

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


def style_block(block: Callable[[str], str]) -> str:
    """Return the light rules, and the dark ones for screens whose reader prefers them.

    >>> style_block("{}".format)
    'light@media screen and (prefers-color-scheme: dark){dark}'
    """
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

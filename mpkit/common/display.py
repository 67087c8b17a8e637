"""How a result is shown, without knowing which code draws it.

Results lie below the views, and import none of them. A table maps the name of the result's class and the requested form
("text", "svg", "figure", ...) to a renderer, as "module:function".
"""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from mpkit.common.disk import write_whole
from mpkit.common.missing_packages import needs_notebook
from mpkit.common.safe_text import escape

if TYPE_CHECKING:
    import pandas as pd


RENDERERS = "mpkit.views.renderers"
"""The table's module, which is imported when something is drawn."""


def draw(result: Any, form: str, *args: Any, **options: Any) -> Any:
    """Draw a result in one form: "text", "svg", "html", "figure", "widget", ...; or its chart, if it has no such form.

    >>> import mpkit as mk
    >>> print(draw(mk.simulate(mk.Plan.gpipe(2, 1)), "text", 40).splitlines()[0])
    GPU 0 │0░░·········0▓▓▓▓▓│ idle 50.0 %

    The form "chart" returns the chart as data. `args` and `options` are further arguments of the renderer.
    """
    names = tuple(base.__name__ for base in type(result).__mro__)
    if drawn := _renderer(names, form):
        return drawn(result, *args, **options)
    chart, charted = _renderer(names, "chart"), _renderer(("Chart",), form)
    if chart is None or charted is None:
        raise LookupError(f"nobody draws a {names[0]} as {form}: {RENDERERS} has no such renderer")
    return charted(chart(result), *args, **options)


@cache
def _renderer(names: tuple[str, ...], form: str) -> Callable[..., Any] | None:
    table = import_module(RENDERERS).RENDERERS
    place = next((row[form] for name in names if form in (row := table.get(name, {}))), None)
    return None if place is None else resolve_name(place)


class DrawnResult:
    """A result that prints, and is a picture in a notebook."""

    _wraps = True
    """Whether its picture can be drawn for a narrow column."""

    def to_svg(self, path: str | Path | None = None) -> str:
        """Return the picture as a standalone SVG document; write it to `path` as well if that is given."""
        return write_text(draw(self, "svg"), path)

    def _words(self) -> str:
        """Return the picture in words, for readers who cannot see it."""
        return str(self)

    def __str__(self) -> str:
        return str(draw(self, "text"))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        drawn = partial(draw, self, "svg") if self._wraps else self.to_svg()
        return {"text/html": image(drawn, self._words()), "text/plain": str(self)}


class ChartedResult(DrawnResult):
    """A result that is an interactive chart in a notebook, or a picture without plotly."""

    def figure(self) -> Any:
        """Return the chart as a plotly Figure; the class says what it shows.

        Raises:
            ImportError: plotly is not installed.
        """
        return draw(self, "figure")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle = DrawnResult._repr_mimebundle_(self, include, exclude)
        with suppress(ImportError):
            bundle |= self.figure()._repr_mimebundle_(include, exclude)
        return {**bundle, "text/plain": str(self)}


class WidgetResult(DrawnResult):
    """A result that is a widget in a notebook, or a picture without one, and on saved pages."""

    def show(self) -> Any:
        """Return the widget, for a notebook.

        Raises:
            ImportError: its packages are not installed.
        """
        return draw(self, "widget")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {}
        with suppress(ImportError):
            shown = self.show()._repr_mimebundle_()
            bundle = dict(shown[0] if isinstance(shown, tuple) else shown)
        return bundle | super()._repr_mimebundle_(include, exclude)


NARROW, WIDE, WIDER = 420, 960, 1400
"""Pixels: the widths of pictures in notebooks."""


def image(drawn: str | Callable[[int], str], words: str, *, fill: bool = False) -> str:
    """Return an `<img>` that holds its SVG, with words for readers who cannot see it.

    This is the only kind of SVG that JupyterLab shows for an output whose widget is gone, and an image runs no script.

    Args:
        drawn: the picture, or a function that draws it in a width: columns of less than 620 pixels, such as half of a
            window or a phone, then show a picture drawn for them.
        words: the picture in words.
        fill: whether it is as wide as its column, like a widget beside it, instead of 960 pixels at most.
    """
    if isinstance(drawn, str):
        return f'<img alt="{escape(words, quote=True)}" style="max-width:100%" src="{_address(drawn)}">'
    # By its surroundings' width, each picture's is far below 0 or far above its maximum: one of them shows.
    above, below = "(100% - 619px)*999", "(620px - 100%)*999"
    shown = {
        WIDE: (f"calc({above})", f"min(100%,{WIDE}px)"),
        NARROW: (f"calc({below})", f"min(100%,{NARROW}px)"),
    }
    if fill:
        shown[WIDE] = f"calc(min({above},(1100px - 100%)*999))", "100%"
        shown[WIDER] = "calc((100% - 1099px)*999)", "100%"
    pictures = []
    for each, (width, most) in shown.items():
        told = f'alt="{escape(words, quote=True)}"' if each == WIDE else 'width="0" height="0" alt=""'
        style = f"width:{width};max-width:{most};height:auto"
        pictures.append(f'<img {told} style="{style}" src="{_address(drawn(each))}">')
    return "".join(pictures)


def _address(svg_text: str) -> str:
    return f"data:image/svg+xml;base64,{b64encode(svg_text.encode()).decode()}"


def write_text(text: str, path: str | Path | None) -> str:
    """Return the text; write it to `path` as well if that is given."""
    if path is not None:
        write_whole(Path(path), text.encode())
    return text


def data_frame(rows: Mapping[str, Any] | Iterable[Any], columns: list[str] | None = None) -> pd.DataFrame:
    """Return a pandas DataFrame of sequences in the order of `columns`, of dicts by column, or of columns by name.

    >>> data_frame([("dp", 8), ("tp", 2)], columns=["axis", "ranks"])
      axis  ranks
    0   dp      8
    1   tp      2
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise needs_notebook("a data frame", error) from error

    # Columns given by name are arrays, and are passed on as they are.
    return pd.DataFrame(rows if isinstance(rows, Mapping) else list(rows), columns=columns)


def in_notebook() -> bool:
    """Whether output goes to a Jupyter front end."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None

"""A run's memory chart as a widget that moves while the run goes: SVG until the page has plotly, then plotly.

A plotly FigureWidget would do the same with five megabytes of plotly in each widget's state. A page that is loaded
again asks for all states at once and gives up after four seconds, and then shows none of the notebook's widgets. So
plotly travels apart from the states, once a page, when the page asks: phases `show` (from any thread) and `_hear`.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from importlib.resources import files
from typing import Any

from mpkit.timeline import Timeline
from mpkit.views.browser import memory_esm
from mpkit.views.memory_svg import memory_svg
from mpkit.views.needs import needs_notebook

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise needs_notebook("the memory chart", error) from error

__all__ = ["MemoryView"]


class MemoryView(anywidget.AnyWidget):
    """The memory of a run so far.

    Attributes:
        picture: as SVG; "" before there is anything to see.
        chart: as plotly's JSON; empty where plotly is not installed.
    """

    _esm = memory_esm()
    picture = traitlets.Unicode().tag(sync=True)
    chart = traitlets.Dict().tag(sync=True)

    def __init__(self) -> None:
        super().__init__()
        self.on_msg(self._hear)

    def show(self, timeline: Timeline) -> None:
        """Show this timeline's memory from now on.

        Args:
            timeline: of the run so far.
        """
        self.picture = memory_svg(timeline)
        try:  # not above: importing plotly takes longer than a run needs to begin
            from mpkit.views.memory import memory_figure
        except ImportError:
            return  # the picture has to do
        self.chart = json.loads(memory_figure(timeline).to_json())

    def _hear(self, _widget: object, message: Any, _buffers: object) -> None:
        if isinstance(message, dict) and message.get("type") == "plotly":
            self.send({"type": "plotly"}, [_packed_plotly()])


@cache
def _packed_plotly() -> bytes:
    """The JavaScript that comes with the installed plotly, gzipped: 1.4 of its 4.8 MB."""
    return gzip.compress((files("plotly") / "package_data" / "plotly.min.js").read_bytes(), 6)

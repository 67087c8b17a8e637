"""A run's memory chart as a widget that moves while the run goes on: SVG until the page has plotly, then plotly.

A plotly FigureWidget would do the same, but with five megabytes of plotly in each widget's state. A page that is loaded
again asks for all states at once, gives up after four seconds, and then shows none of the notebook's widgets. So
plotly is sent apart from the states, once per page, when the page asks: phases `show` (from any thread) and `_hear`.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from importlib.resources import files
from typing import Any

from mpkit.support.needs import needs_notebook
from mpkit.timeline.timeline import Timeline
from mpkit.views.browser import memory_esm
from mpkit.views.memory.svg import memory_svg

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise needs_notebook("the memory chart", error) from error

__all__ = ["MemoryView"]


class MemoryView(anywidget.AnyWidget):
    """The memory of a run so far.

    Attributes:
        picture: the chart as SVG; "" before there is anything to see.
        chart: the chart as plotly's JSON; empty if plotly is not installed.
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
            timeline: the timeline of the run so far.
        """
        self.picture = memory_svg(timeline)
        try:  # imported here since importing plotly takes longer than a run needs to begin
            from mpkit.views.memory.chart import memory_figure
        except ImportError:
            return  # the SVG picture is shown instead
        self.chart = json.loads(memory_figure(timeline).to_json())

    def _hear(self, _widget: object, message: Any, _buffers: object) -> None:
        if isinstance(message, dict) and message.get("type") == "plotly":
            self.send({"type": "plotly"}, [_packed_plotly()])


@cache
def _packed_plotly() -> bytes:
    """Return the installed plotly's JavaScript, gzipped: 1.4 of its 4.8 MB."""
    return gzip.compress((files("plotly") / "package_data" / "plotly.min.js").read_bytes(), 6)

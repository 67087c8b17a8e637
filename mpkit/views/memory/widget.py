"""A run's memory chart as a widget that moves while the run goes on, drawn by plotly; where there is none, as SVG.

A plotly FigureWidget would do the same, but with five megabytes of plotly in each widget's state. A page that is loaded
again asks for all states at once, gives up after four seconds, and then shows none of the notebook's widgets. So
plotly is sent apart from the states, once per page, when the page asks: phases `show` (from any thread) and `_hear`.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
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
        plotted: whether plotly draws it: one of the two draws it from the first frame to the last.
        chart: the chart as plotly's JSON; empty before there is anything to see.
        picture: the chart as SVG, if plotly is not installed.
    """

    _esm = memory_esm()
    plotted = traitlets.Bool().tag(sync=True)
    picture = traitlets.Unicode().tag(sync=True)
    chart = traitlets.Dict().tag(sync=True)

    def __init__(self) -> None:
        super().__init__(plotted=find_spec("plotly") is not None)
        self.on_msg(self._hear)

    def show(self, timeline: Timeline) -> None:
        """Show this timeline's memory from now on.

        Args:
            timeline: the timeline of the run so far.
        """
        if not self.plotted:
            self.picture = memory_svg(timeline)
            return
        from mpkit.views.memory.chart import (
            memory_figure,  # importing plotly takes longer than a run needs to begin
        )

        self.chart = json.loads(memory_figure(timeline).to_json())

    def _hear(self, _widget: object, message: Any, _buffers: object) -> None:
        if isinstance(message, dict) and message.get("type") == "plotly":
            self.send({"type": "plotly"}, [_packed_plotly()])


@cache
def _packed_plotly() -> bytes:
    """Return the installed plotly's JavaScript, gzipped: 1.4 of its 4.8 MB."""
    return gzip.compress((files("plotly") / "package_data" / "plotly.min.js").read_bytes(), 6)

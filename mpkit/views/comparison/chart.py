"""A comparison in a notebook: interactive timelines on one axis, and where the time goes as a plotly chart."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpkit.common.display import image
from mpkit.common.missing_packages import needs_notebook
from mpkit.common.units import seconds
from mpkit.timeline.idleness import CAUSES
from mpkit.views.comparison.svg import bars_svg
from mpkit.views.drawing.colours import CAUSE_INKS
from mpkit.views.drawing.lanes import widest_label
from mpkit.views.theme import dress_chart
from mpkit.views.timeline.widget import TimelineView

if TYPE_CHECKING:
    from mpkit.timeline.comparison import Comparison

try:
    import ipywidgets
    import plotly.graph_objects as go
except ImportError as error:
    raise needs_notebook("a comparison's view", error) from error

__all__ = ["comparison_figure", "comparison_view"]


def comparison_view(comparison: Comparison) -> Any:
    """Lay out the timelines below each other, on the axis of the longest, and below them where the time goes."""
    room = max(row.timeline.step_time for row in comparison.rows)
    widest = widest_label(row.timeline for row in comparison.rows)
    views = [TimelineView(row.timeline, title=row.name, room=room, widest=widest) for row in comparison.rows]
    return ipywidgets.VBox([*views, ipywidgets.HTML(image(partial(bars_svg, comparison), str(comparison)))])


def comparison_figure(comparison: Comparison) -> Any:
    """Draw work and idle time by cause, averaged over ranks, as a plotly Figure: a stacked bar per timeline."""
    rows = comparison.rows[::-1]  # plotly draws the first one at the bottom
    names = [row.name for row in rows]
    figure = go.Figure()
    for what in ("work", *CAUSES):
        values = [sum(row.work.values()) if what == "work" else row.idle[what] for row in rows]
        if any(values):
            figure.add_trace(
                go.Bar(
                    y=names,
                    x=values,
                    name=what if what == "work" else f"idle: {what}",
                    orientation="h",
                    marker_color=CAUSE_INKS[what],
                    customdata=[seconds(value) for value in values],
                    hovertemplate="%{y}: %{customdata}<extra>" + what + "</extra>",
                )
            )
    title, height = "A step's time, averaged over ranks", 160 + 44 * len(rows)
    dress_chart(figure, title, height, left=16, barmode="stack")
    return figure.update_xaxes(tickformat="~s", ticksuffix="s", nticks=6)

"""A communication matrix as plotly heatmaps, one per axis, all on one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.missing_packages import needs_notebook
from mpkit.common.units import bytes_text
from mpkit.views.drawing.axes import ink_of, tint
from mpkit.views.theme import dress_chart
from mpkit.views.traffic.text import suitable_unit

if TYPE_CHECKING:
    import numpy.typing as npt

    from mpkit.timeline.traffic import CommMatrix

try:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots
except ImportError as error:
    raise needs_notebook("the chart of who sends to whom", error) from error

__all__ = ["traffic_figure"]

ACROSS = 3
NUMBERED = 8
"""The most ranks for which a cell has room for its number."""


def traffic_figure(matrix: CommMatrix) -> Any:
    """Draw the heatmaps as a plotly Figure; hovering shows who sends what to whom.

    Colours scale with the square root of the bytes, so that small amounts remain visible next to tensor parallelism.
    """
    axes = matrix.axes
    across = min(max(len(axes), 1), ACROSS)
    down = max(-(-len(axes) // across), 1)
    titles = [_title(axis, matrix.by_axis[axis]) for axis in axes]
    figure = make_subplots(
        rows=down, cols=across, subplot_titles=titles, horizontal_spacing=0.09, vertical_spacing=0.24 / down
    )
    highest = max((float(amounts.max()) for amounts in matrix.by_axis.values()), default=1.0)
    for number, axis in enumerate(axes):
        place = {"row": number // across + 1, "col": number % across + 1}
        figure.add_trace(_heatmap(matrix, axis, highest), **place)
        shape = {
            "scaleanchor": f"x{number + 1 if number else ''}",
            "constrain": "domain",
            "constraintoward": "top",
        }
        figure.update_yaxes(autorange="reversed", title="from rank", **shape, **place)
        figure.update_xaxes(title="to rank", constrain="domain", **place)
    figure.update_annotations(font={"size": 13})
    ticks = {"dtick": 1 if len(matrix.places) <= 16 else None, "showgrid": False, "zeroline": False}
    tall = 110 + (280 if across == ACROSS else 340) * down
    dress_chart(figure, matrix.title, tall, left=56, above=36)
    return (
        figure.update_layout(plot_bgcolor="rgba(128,128,128,0.1)").update_yaxes(**ticks).update_xaxes(**ticks)
    )


def _title(axis: str, amounts: npt.NDArray[np.float64]) -> str:
    unit = f", cells in {suitable_unit(amounts)[1]}" if len(amounts) <= NUMBERED else ""
    return f"<b>{axis}</b>  {bytes_text(amounts.sum())}{unit}"


def _heatmap(matrix: CommMatrix, axis: str, highest: float) -> Any:
    amounts, ink = matrix.by_axis[axis], ink_of(axis, matrix.mesh)
    factor, _ = suitable_unit(amounts)
    stops = np.linspace(0.0, 1.0, 11)
    ranks = range(len(amounts))
    names = [
        f"rank {rank} ({place})" if place else f"rank {rank}" for rank, place in enumerate(matrix.places)
    ]
    hover = [
        [
            f"{names[row]} to {names[column]}<br><b>{bytes_text(amounts[row, column])}</b> along {axis}"
            for column in ranks
        ]
        for row in ranks
    ]
    words = [[f"{value / factor:.3g}" if value else "" for value in row] for row in amounts.tolist()]
    return go.Heatmap(
        z=np.where(amounts > 0, amounts, np.nan),
        zmin=0.0,
        zmax=highest,
        colorscale=[[float(stop), tint(ink, float(np.sqrt(stop)))] for stop in stops],
        showscale=False,
        xgap=2,
        ygap=2,
        text=words,
        texttemplate="%{text}" if len(amounts) <= NUMBERED else None,
        textfont={"size": 11},
        customdata=hover,
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
    )

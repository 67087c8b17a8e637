"""Advice in a notebook.

chart      step time against memory, every plan that fits, the frontier marked
table      the best plans, sortable
parts      both, with the reasons and the timelines of the best three
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpkit.common.display import image
from mpkit.common.missing_packages import needs_notebook
from mpkit.common.safe_text import escape
from mpkit.common.units import memory_text, percent, seconds
from mpkit.views.comparison.svg import comparison_svg
from mpkit.views.drawing.sortable import Cell, Column, SortableTable
from mpkit.views.theme import ACCENT, ALARM, GREY, WHOLE_WORDS, dress_chart

if TYPE_CHECKING:
    from mpkit.prediction.advice.advice import Advice

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise needs_notebook("the chart of an advice", error) from error

__all__ = ["advice_figure", "advice_parts", "advice_table"]

GIB = 2**30
MOST = 2000
"""Points that are drawn: the fastest, beside the frontier."""

LEGIBLE = 5000
"""Operations of a timeline that a still picture shows; of more, `mk.compare(**advice.timelines())` draws a live one."""


def advice_figure(advice: Advice) -> Any:
    """Draw the chart as a plotly Figure.

    Args:
        advice: what to draw. No plan that was found is both faster and smaller than one on the frontier; hovering over
            a point shows the plan.
    """
    figure = go.Figure()
    shown = advice.found[:MOST]
    figure.add_trace(
        go.Scattergl(
            x=[each.memory / GIB for each in shown],
            y=[each.seconds for each in shown],
            mode="markers",
            name=f"the {len(shown):,} fastest of {len(advice.found):,} plans that fit",
            marker={"color": GREY, "size": 4, "opacity": 0.4},
            hoverinfo="skip",
        )
    )
    frontier = advice.frontier
    guesses = [advice.estimate(plan) for plan in frontier]
    figure.add_trace(
        go.Scatter(
            x=[advice.fullest_bytes(guess) / GIB for guess in guesses],
            y=[guess.step_time for guess in guesses],
            text=[repr(plan) for plan in frontier],
            mode="lines+markers",
            name="the frontier: none found is faster and smaller",
            line={"color": ACCENT, "shape": "hv"},
            hovertemplate="%{text}<br>%{y:.3s}s per step, %{x:.1f} GiB<extra></extra>",
        )
    )
    room = advice.priced.hardware.device.memory / GIB
    figure.add_vline(
        x=room,
        line_dash="dash",
        line_color=ALARM,
        annotation_text=f"a device has {memory_text(room * GIB)} ",
        annotation_position="top left",
    )
    dress_chart(figure, str(advice).split(":")[0], 420)
    figure.update_xaxes(title="GiB on the fullest rank")
    return figure.update_yaxes(title="seconds per step", type="log")


COLUMNS = (
    Column("plan", "the plan, as Python", number=False),
    Column("step", "seconds per step"),
    Column("GiB", "memory of the fullest rank"),
    Column("tokens/s", "tokens per second of all devices"),
    Column("MFU", "model FLOPs utilization"),
    Column("most of it", "what takes most of the step", number=False),
)


def advice_table(advice: Advice) -> SortableTable:
    """Lay out a row per plan of `advice.plans`, the best first."""
    rows: list[list[Cell]] = []
    for plan, found in zip(advice.plans, advice.found, strict=False):
        this = advice.estimate(plan)
        most = next(iter(this.because))
        rows.append(
            [
                (repr(plan), repr(plan)),
                (seconds(this.step_time), this.step_time),
                (f"{found.memory / GIB:.1f}", found.memory),
                (f"{this.tokens_per_second:,.0f}", this.tokens_per_second),
                (percent(this.mfu), this.mfu),
                (most, most),
            ]
        )
    return SortableTable(f"The best {len(rows)} of {len(advice.found):,} plans that fit", COLUMNS, rows)


def advice_parts(advice: Advice) -> list[Any]:
    """Return what a notebook shows of an advice, from top to bottom: nothing but the words if no plan fits."""
    from IPython.display import HTML

    from mpkit.timeline.comparison import compare_timelines

    words = HTML(f'<pre style="{WHOLE_WORDS}">{escape(str(advice))}</pre>')
    if advice.best is None:
        return [words]
    parts = [words, advice_table(advice), advice_figure(advice)]
    timelines = advice.timelines(3)
    if max(len(each.spans) for each in timelines.values()) <= LEGIBLE:
        three = compare_timelines([*timelines.items()])
        parts.append(
            HTML(image(partial(comparison_svg, three), f"Predicted timelines of the best plans. {three}"))
        )
    return parts

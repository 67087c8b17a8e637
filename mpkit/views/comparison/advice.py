"""Advice in a notebook.

chart      step time against memory, every plan that fits, the frontier marked
table      the best plan of each family
parts      both, below the reasons
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from mpkit.common.missing_packages import needs_notebook
from mpkit.common.safe_text import escape
from mpkit.common.units import memory_text, percent, seconds
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
    if isfinite(room := advice.priced.whole / GIB):
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
    Column("parts", "what the plan has beside data parallelism", number=False),
    Column("step", "seconds per step"),
    Column("longer", "than the best plan's step"),
    Column("GiB", "memory of the fullest rank"),
    Column("plan", "the plan, as Python", number=False),
)


def advice_table(advice: Advice) -> SortableTable:
    """Lay out the best plan of each family, the simplest first: what every further part gains."""
    rows: list[list[Cell]] = []
    for family in advice.families:
        simplest = ", the simplest within 5 %" if family.plan == advice.simplest else ""
        rows.append(
            [
                (f"{family.words}{simplest}", family.words),
                (_unbroken(seconds(family.seconds)), family.seconds),
                (_unbroken(percent(family.longer)) if family.longer > 0 else "the best", family.longer),
                (f"{family.memory / GIB:.1f}", family.memory),
                (repr(family.plan), repr(family.plan)),
            ]
        )
    return SortableTable(
        f"What each further part gains, of {len(advice.found):,} plans that fit", COLUMNS, rows
    )


def _unbroken(words: str) -> str:
    """Return an amount that no line ends within."""
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def advice_parts(advice: Advice) -> list[Any]:
    """Return what a notebook shows of an advice, from top to bottom: nothing but the words if no plan fits."""
    from IPython.display import HTML

    words = HTML(f'<pre style="{WHOLE_WORDS}">{escape(str(advice))}</pre>')
    return [words] if advice.best is None else [words, advice_table(advice), advice_figure(advice)]

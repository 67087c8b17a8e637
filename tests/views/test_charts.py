"""Charts as data, and what SVG, plotly and text show of them: the same numbers."""

from __future__ import annotations

import re
from math import nan

import pytest

import mpkit as mk
from mpkit.common.display import draw
from mpkit.trace.metrics import Metrics
from mpkit.views.chart.chart import Chart, Panel, Series, chart_text
from mpkit.views.chart.figure import chart_figure
from mpkit.views.chart.svg import chart_svg
from mpkit.views.results.losses import losses

STACKED = [Series("a", [1.0, 3.0]), Series("b", [2.0, None]), Series("limit", [2.5, 2.5], "#d55e00", "mark")]


@pytest.mark.parametrize("kind", ["bars", "rows"])
def test_bars_are_stacked_in_every_form(kind: str) -> None:
    chart = Chart("T", [Panel(STACKED, ["x", "y"], kind, groups=[("one", 1), ("other", 1)])])  # type: ignore[arg-type]
    drawn = chart_svg(chart)
    size, at = ("height", "y") if kind == "bars" else ("width", "x")
    bars = re.findall(rf'<rect class="i(\w+)" [^>]*{at}="([\d.]+)"[^>]*{size}="([\d.]+)"[^>]*><title>', drawn)
    lengths = [float(size) for _, _, size in bars]
    assert lengths[1] == pytest.approx(3 * lengths[0], rel=0.02) and lengths[2] == pytest.approx(
        2 * lengths[0], rel=0.02
    )
    figure = chart_figure(chart)
    assert figure.layout.barmode == "stack" and [trace.name for trace in figure.data] == ["a", "b", "limit"]
    assert [each for each in (figure.data[0].y if kind == "bars" else figure.data[0].x)] == [1, 3]
    assert chart_text(chart).splitlines()[-1].split() == ["other", "y", "3", "2.5", "3"]


def test_nothing_is_drawn_of_too_little_and_the_place_of_what_comes_is_kept() -> None:
    assert losses([1.0, 2.0], 0, Metrics()) is None
    for values in ([1.0, 1.0, 1.0], [nan, nan, nan]):
        chart = losses(values, 0, Metrics())
        assert chart is not None and chart_svg(chart).startswith("<svg")
    many = losses([], 0, Metrics({f"m{i}": {0: {0: float(i)}} for i in range(20)}))
    assert many is not None and "not drawn: m12" in chart_svg(many)
    # A run's chart is as tall before its first step as at its end, so that nothing below it moves.
    heights = {
        re.search(r'height="(\d+)"', chart_svg(chart))[1]  # type: ignore[index]
        for values in ([], [3.0], [3.0, 2.0, 1.0]) if (chart := losses(values, 0, Metrics(), 9)) is not None
    }  # fmt: skip
    assert len(heights) == 1


def test_a_result_without_a_form_says_so() -> None:
    with pytest.raises(LookupError, match="nobody draws a Timeline as carpet"):
        draw(mk.simulate(mk.Plan.gpipe(2, 1)), "carpet")

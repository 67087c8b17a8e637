"""`mk.chart`: a table's columns against each other, as text and as a plotly Figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

import mpkit as mk

ROWS: list[dict[str, Any]] = [
    {"GPUs": f"t = {t}", "GB/s": speed, "ms": t * 100 / speed} for t in (1, 2) for speed in (5, 20, 300)
]


def test_each_series_has_its_rows_and_differs_by_colour_and_symbol() -> None:
    figure = mk.chart(ROWS, x="GB/s", y="ms", by="GPUs", title="By the wire").figure()
    assert [trace.name for trace in figure.data] == ["t = 1", "t = 2"]
    assert list(figure.data[1].x) == [5, 20, 300]
    assert list(figure.data[1].y) == pytest.approx([40, 10, 2 / 3])
    assert len({(trace.line.color, trace.marker.symbol) for trace in figure.data}) == 2
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("GB/s", "ms")
    assert figure.layout.title.text == "By the wire" and figure.layout.legend.title.text == "GPUs"
    assert figure.layout.paper_bgcolor == "rgba(0,0,0,0)", "it stands on light and dark pages"


@pytest.mark.parametrize(
    "table",
    [
        ROWS,
        pd.DataFrame(ROWS),
        pd.DataFrame(ROWS).set_index("GB/s"),
        {name: [row[name] for row in ROWS] for name in ROWS[0]},
    ],
    ids=["rows", "frame", "index", "columns"],
)
def test_any_table_is_one(table: Any) -> None:
    assert str(mk.chart(table, x="GB/s", y="ms")) == str(mk.chart(ROWS, x="GB/s", y="ms"))


def test_logarithmic_axes_have_round_ticks_and_marks_where_they_belong() -> None:
    drawn = mk.chart(ROWS, x="GB/s", y="ms", by="GPUs", log="xy", marks={"PCIe, 4.0": 32})
    figure = drawn.figure()
    assert list(figure.layout.xaxis.tickvals) == [5, 10, 20, 50, 100, 200, 500]
    assert figure.layout.annotations[0].x == pytest.approx(1.505, abs=1e-3), "plotly wants its logarithm"
    assert figure.layout.shapes[0].x0 == 32
    assert str(drawn).splitlines()[-1] == "marked at 32: PCIe, 4.0"


def test_bars_are_categories_with_their_words() -> None:
    figure = mk.chart(ROWS[:3], x="GB/s", y="ms", label="GPUs", kind="bars").figure()
    assert list(figure.data[0].x) == ["5", "20", "300"] and figure.data[0].text == ("t = 1",) * 3
    assert figure.layout.yaxis.rangemode == "tozero"


def test_it_tells_its_values_in_words() -> None:
    shown = mk.chart(ROWS[:2], x="GB/s", y="ms", title="By the wire")._repr_mimebundle_()
    assert shown["text/plain"] == "By the wire\nGB/s  ms\n   5  20\n  20   5"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mk.chart(ROWS, x="GBs", y="ms"), "did you mean x='GB/s'"),
        (lambda: mk.chart(ROWS, x="GB/s", y="ms", by="gpu"), r"by='gpu'.* GPUs, GB/s, ms"),
        (lambda: mk.chart([], x="a", y="b"), "no rows"),
        (lambda: mk.chart(3, x="a", y="b"), "give a DataFrame, rows"),
        (lambda: mk.chart("table.csv", x="a", y="b"), "give a DataFrame, rows"),
        (lambda: mk.chart({"a": [1, 2], "b": [1]}, x="a", y="b"), "different lengths"),
        (lambda: mk.chart(ROWS, x="ms", y="GPUs"), "'GPUs' is 't = 1' in a row"),
        (lambda: mk.chart([{"a": 1, "b": float("nan")}], x="a", y="b"), "finite number"),
        (lambda: mk.chart([{"a": 0, "b": 1}], x="a", y="b", log="x"), "no place on a logarithmic axis"),
        (lambda: mk.chart(ROWS, x="GB/s", y="ms", kind="pie"), "kind='lines', 'bars' or 'points'"),  # type: ignore[arg-type]
        (lambda: mk.chart(ROWS, x="GB/s", y="ms", log="z"), "log='', 'x', 'y' or 'xy'"),
        (lambda: mk.chart(ROWS, x="GPUs", y="ms", marks={"PCIe": 3}), "needs numbers"),
    ],
)
def test_mistakes_say_what_would_work(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()

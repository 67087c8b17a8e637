"""The charts of loss and metrics by step."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from math import inf, nan

from mpkit.trace.metrics import Metrics
from mpkit.views.dashboard.charts import charts_svg, panels_of

METRICS = Metrics(
    {
        "eval loss": {0: {1: 2.0, 3: 1.0}},
        "<b>norm</b>": {0: {0: 1.0, 1: 2.0}, 1: {0: 3.0, 1: 4.0}},
        "lr": {0: {0: 1e-3, 1: 1e-3}, 1: {0: 1e-3, 1: 1e-3}},
    }
)


def test_evaluation_shares_the_panel_of_what_it_evaluates() -> None:
    panels = panels_of([3.0, 2.5], 4, METRICS)
    assert [panel.name for panel in panels] == ["loss", "<b>norm</b>", "lr"]
    assert panels[0].lines == {"loss": {4: 3.0, 5: 2.5}, "eval loss": {1: 2.0, 3: 1.0}}
    assert list(panels[1].lines) == ["<b>norm</b>, rank 0", "<b>norm</b>, rank 1"]
    assert list(panels[2].lines) == ["lr"]  # the same on both


def test_the_axes_have_names_and_numbers_and_no_value_is_html() -> None:
    drawn = charts_svg([3.0, 2.5, nan, inf], 0, METRICS)
    root = ET.fromstring(drawn)
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("step") == 3 and "2.5" in texts and "<b>" not in drawn
    assert any("eval loss 1" in text for text in texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 5


def test_nothing_is_drawn_of_too_little() -> None:
    assert charts_svg([1.0, 2.0], 0, Metrics()) == ""
    assert charts_svg([1.0, 1.0, 1.0], 0, Metrics()).startswith("<svg")
    assert charts_svg([nan, nan, nan], 0, Metrics()).startswith("<svg")
    many = Metrics({f"m{i}": {0: {0: float(i)}} for i in range(20)})
    assert "not drawn: m12" in charts_svg([], 0, many)

"""Memory over time, and its picture."""

from __future__ import annotations

from xml.etree import ElementTree

import mpkit as mk
from mpkit.trace import CATEGORIES
from mpkit.views.chart.svg import chart_svg
from mpkit.views.memory.charts import memory_over_time
from mpkit.views.memory.series import memory_of


def test_categories_over_time(data_parallel: mk.Timeline) -> None:
    memory = memory_of(data_parallel, 0)
    assert memory.times.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]
    activations = memory.levels[:, CATEGORIES.index("activations")]
    assert activations.tolist() == [0, 300, 600, 600, 300, 300, 0, 0]
    assert memory.total == 400 + 800 + 600 + 200


def test_a_panel_a_gpu_with_its_peak(data_parallel: mk.Timeline) -> None:
    drawn = chart_svg(memory_over_time(data_parallel, title="<b>"))
    root = ElementTree.fromstring(drawn)
    panels = root.findall("{http://www.w3.org/2000/svg}g")
    assert [panel.get("aria-label") for panel in panels] == ["rank 0 (CPU)", "rank 1 (CPU)"]
    assert drawn.count("peak 1.95 KiB") == 2 + 2  # drawn, and said

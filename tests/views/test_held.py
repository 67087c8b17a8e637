"""Memory over time, and its picture."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from xml.etree import ElementTree

import mpkit as mk
from mpkit.trace import CATEGORIES
from mpkit.views.chart.svg import chart_svg
from mpkit.views.memory.charts import memory_over_time
from mpkit.views.memory.series import UNMEASURED, memory_of, repeated_from
from mpkit.views.timeline.tracks import pack_tracks


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


def test_watched_steps_that_were_not_measured_are_marked() -> None:
    """The first steps are measured until one repeats another; those after it are drawn as it was."""
    timeline = mk.simulate(mk.Plan.gpipe(2, 2), steps=5)
    assert repeated_from(timeline) == inf  # not watched: all was measured
    watched = replace(timeline, meta={**timeline.meta, "watched": True})
    # The second step frees what the first held when it began, and the third does the same: the fourth is not measured.
    fourth = timeline.spans[(timeline.spans["step"] == 3) & (timeline.spans["rank"] == 0)]
    assert repeated_from(watched) == fourth["start"].min()
    drawn = chart_svg(memory_over_time(watched))
    assert UNMEASURED in " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", drawn))
    assert drawn.count('opacity="0.5"') == 2
    head, _ = pack_tracks(watched)
    assert head["tracks"][0]["repeats"] == repeated_from(watched) and UNMEASURED in head["tracks"][0]["told"]

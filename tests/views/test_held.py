"""Memory over time, and its picture."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from xml.etree import ElementTree

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.timeline.replay.spans import HELD
from mpkit.trace import CATEGORIES
from mpkit.views.chart.svg import chart_svg
from mpkit.views.memory.charts import memory_over_time
from mpkit.views.memory.peak import UNMEASURED, repeated_from
from mpkit.views.memory.series import memory_of
from mpkit.views.timeline.tracks import pack_tracks

CHANGES = st.lists(
    st.tuples(st.floats(0, 40), st.integers(0, len(CATEGORIES) - 1), st.integers(0, 10**9)),
    min_size=1,
    max_size=300,
)


@given(CHANGES, st.integers(8, 60))
def test_few_points_keep_the_peak(changes: list[tuple[float, int, int]], points: int) -> None:
    held = np.array([(time, 0, category, total) for time, category, total in sorted(changes)], HELD)
    timeline = replace(mk.simulate(mk.Plan.gpipe(1, 1)), held=held)
    memory = memory_of(timeline, 0, points)
    now, most = dict.fromkeys(range(len(CATEGORIES)), 0), 0
    for i, change in enumerate(held):
        now[int(change["category"])] = int(change["total"])
        if (
            i + 1 == len(held) or held["time"][i + 1] > change["time"]
        ):  # what is held only within a moment is not
            most = max(most, sum(now.values()))
    assert memory.total == np.float32(most) or abs(memory.total - most) < 1e-6 * most
    assert len(memory.times) <= points
    assert np.all(np.diff(memory.times) >= 0)
    assert memory.times.dtype == memory.levels.dtype == np.float64


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


def test_a_simulation_counts_micro_batches() -> None:
    assert "peak 8 micro-batches" in chart_svg(memory_over_time(mk.simulate(mk.Plan.gpipe(4, 8))))


def test_many_gpus_and_no_memory(gpipe: mk.Timeline) -> None:
    many = replace(gpipe, world_size=100)
    drawn = chart_svg(memory_over_time(many))
    assert "and 36 GPUs more" in drawn
    ElementTree.fromstring(chart_svg(memory_over_time(replace(gpipe, held=gpipe.held[:0]))))


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

"""The charts of the tutorials as methods of the kit: bubbles by micro-batches, memory by plan."""

from __future__ import annotations

import re

import pytest

import mpkit as mk


def gpipe(m: int, p: int = 4) -> mk.Timeline:
    return mk.simulate(mk.Plan.gpipe(p, m))


def test_the_points_lie_on_the_line_where_stages_are_equal() -> None:
    curve = mk.experiments.bubble_curve([mk.simulate(mk.Plan.naive_mp(4)), gpipe(16), gpipe(4)])
    assert [point.microbatches for point in curve.points] == [1, 4, 16]
    for point in curve.points:
        assert point.bubble == pytest.approx(3 / (point.microbatches + 3))
        assert point.formula == pytest.approx(point.bubble)
        assert curve.formula(point.microbatches) == pytest.approx(point.bubble)
    table = curve.to_dataframe()
    assert table.index.tolist() == [1, 4, 16]
    assert table["seconds per step"].tolist() == [12, 21, 57]
    svg = curve.to_svg()
    dots = [float(y) for y in re.findall(r'<circle class="i[^"]*" cx="[^"]*" cy="([^"]*)" r="6"', svg)]
    line = dict(
        tuple(map(float, pair.split(",")))
        for pair in re.search(r'points="([^"]*)"', svg)[1].split()  # type: ignore[index, misc]
    )
    assert len(dots) == 3 and set(dots) <= set(line.values())
    assert dots == sorted(dots)  # more micro-batches, less bubble: further down
    # A picture on both grounds, with units, and in words for readers who cannot see it.
    assert "prefers-color-scheme: dark" in svg and "number of micro-batches m" in svg and "75 %" in svg
    shown = curve._repr_mimebundle_()
    assert "27.3" not in shown["text/plain"] and 'alt="Bubble by micro-batches' in shown["text/html"]


def test_memory_by_plan_is_the_timelines_peak() -> None:
    runs = {"GPipe": gpipe(8), "1F1B": mk.simulate(mk.Plan.pipeline("1f1b", 4, 8))}
    memory = mk.experiments.memory_by_plan(runs)
    table = memory.to_dataframe()
    assert table.groupby("plan", sort=False)["total"].apply(list).tolist() == [[8, 8, 8, 8], [4, 3, 2, 1]]
    svg = memory.to_svg()
    heights = [float(tall) for tall in re.findall(r'<rect class="i[^>]*height="([\d.]+)"><title>', svg)]
    assert [round(8 * tall / max(heights)) for tall in heights] == [8, 8, 8, 8, 4, 3, 2, 1]
    assert "activations: 2 micro-batches" in svg and ">micro-batches<" in svg
    assert (
        "1F1B   2" in str(memory) and 'alt="Most memory per rank' in memory._repr_mimebundle_()["text/html"]
    )

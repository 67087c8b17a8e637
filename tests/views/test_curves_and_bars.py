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


def test_a_slow_stage_lies_above_the_line_and_other_schedules_have_their_own() -> None:
    slow = mk.simulate(mk.Plan.gpipe(4, 8), forward=[1, 1, 1, 2])
    (point,) = mk.experiments.bubble_curve([slow]).points
    assert point.formula is not None and point.bubble > point.formula
    zero_bubble = mk.experiments.bubble_curve([mk.simulate(mk.Plan.pipeline("zb_h1", 4, 8))])
    assert zero_bubble.formula(8) == pytest.approx(1 / 9)
    assert zero_bubble.formula(2) is None  # too few micro-batches to fill the pipeline
    own = mk.experiments.bubble_curve([mk.simulate(mk.Plan.from_schedule(["F0 F1 B0 B1", "F0 B0 F1 B1"]))])
    assert own.formula(2) is None and own.points[0].formula is None
    assert "polyline" not in own.to_svg() and "-" in str(own).splitlines()[-1]


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


def test_of_many_ranks_some_are_drawn_and_it_says_so() -> None:
    memory = mk.experiments.memory_by_plan({"GPipe": gpipe(4, p=20)})
    assert "4 more ranks not shown" in memory.to_svg()
    assert len(memory.to_dataframe()) == 20


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mk.experiments.bubble_curve([]), "give one run or more"),
        (lambda: mk.experiments.bubble_curve([3]), "give Runs or Timelines"),  # type: ignore[list-item]
        (lambda: mk.experiments.bubble_curve([mk.simulate(mk.Plan.serial())]), "is no pipeline"),
        (
            lambda: mk.experiments.bubble_curve([gpipe(4), gpipe(4, p=2)]),
            "differ in more than their micro-batches",
        ),
        (lambda: mk.experiments.memory_by_plan({}), "by name"),
        (lambda: mk.experiments.memory_by_plan([gpipe(4)]), "by name"),  # type: ignore[arg-type]
        (lambda: mk.experiments.memory_by_plan({"a": 3}), "give a Run or a Timeline"),  # type: ignore[dict-item]
    ],
)
def test_mistakes_say_what_would_work(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=says):
        make()

"""Ranks of a mesh: what they are called, and how their lanes are grouped in every picture."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mpkit as mk
from mpkit.plan.mesh import Mesh
from mpkit.views.drawing.lanes import groups_of, rank_label, short_label
from mpkit.views.timeline.picture import picture

Meshed = Callable[..., mk.Timeline]


@pytest.mark.parametrize(
    ("mesh", "label", "groups"),
    [
        (Mesh(pp=2, dp=2, tp=2), "rank 1  pp0 dp0 tp1", ["pp0 dp0", "pp0 dp1", "pp1 dp0", "pp1 dp1"]),
        (Mesh(pp=2, dp=2), "rank 1  pp0 dp1", ["pp0", "pp1"]),
        (Mesh(dp=2, tp=2), "rank 1  dp0 tp1", ["dp0", "dp1"]),
        (Mesh(pp=2, cp=2, tp=2), "rank 1  pp0 cp0 tp1", ["pp0", "pp1"]),
        (Mesh(cp=2, tp=2), "rank 1  cp0 tp1", ["cp0", "cp1"]),
        (Mesh(tp=4), "rank 1 (CPU)", []),
    ],
)
def test_names_and_groups(meshed: Meshed, mesh: Mesh, label: str, groups: list[str]) -> None:
    timeline = meshed(mesh)
    assert rank_label(timeline, 1) == label
    assert short_label(timeline, 1) == label.split("  ")[0]
    assert [group.place for group in groups_of(timeline)] == groups


def test_lanes_are_below_their_groups_header_and_fold(meshed: Meshed) -> None:
    timeline = meshed(Mesh(pp=2, dp=1, tp=2))
    rows = [(row.part, row.label) for row in picture(timeline).rows if row.part in ("group", "compute")]
    assert rows == [
        ("group", "pp0 · ranks 0, 1"), ("compute", "rank 0  pp0 tp0"), ("compute", "rank 1  pp0 tp1"),
        ("group", "pp1 · ranks 2, 3"), ("compute", "rank 2  pp1 tp0"), ("compute", "rank 3  pp1 tp1"),
    ]  # fmt: skip
    whole, folded = picture(timeline), picture(timeline, fold=True)
    assert [row.rank for row in folded.rows if row.part == "compute"] == [0, 2]
    assert folded.rows[0].label == "pp0 · the first of ranks 0, 1"
    # What is left of it is drawn as it was, on the same axis, and the figures are of all ranks.
    assert (folded.duration, folded.figures) == (whole.duration, whole.figures)
    assert folded.idle_share(2) == whole.idle_share(2)
    assert {timeline.spans["rank"][box["span"]] for box in folded.boxes if box["span"] >= 0} == {0, 2}

"""How much a rank sends, beside what the formulas of the papers say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import mpkit as mk
from mpkit.plan.mesh import Mesh
from mpkit.timeline.volume import VolumeRow

Meshed = Callable[..., mk.Timeline]


def by_kind(timeline: mk.Timeline, rank: int | None = None) -> dict[tuple[str, str], VolumeRow]:
    return {(row.axis, row.kind): row for row in timeline.comm_volume(rank).rows}


def told(timeline: mk.Timeline, plan: dict[str, Any], **mesh: Any) -> mk.Timeline:
    """With more of the plan, and what the mesh's part of meta says."""
    known = {**json.loads(timeline.meta["plan"]), **plan}
    return replace(timeline, meta={**timeline.meta, "plan": json.dumps(known), "mesh": mesh})


def test_three_dimensions_beside_their_formulas(meshed: Meshed) -> None:
    # By hand: one all-reduce of 1000 bytes an action, so half a region; 4 micro-batches; 1000 parameters of 4 bytes.
    made = meshed(Mesh(pp=2, dp=2, tp=2), 4)
    timeline = told(
        made,
        {"microbatches": 4},
        layers_tp=[1, 1],
        stream_bytes=500,
        local_params=[1000] * 8,
        element_bytes=4,
    )
    found = by_kind(timeline)
    assert list(found) == [
        ("pp", "send"), ("dp", "all_reduce"), ("tp", "all_reduce"), ("pp x dp x tp", "all_reduce")
    ]  # fmt: skip
    tp = found["tp", "all_reduce"]
    assert (tp.calls, tp.payload, tp.wire) == (8, 8000, 8000)
    # 4 micro-batches, a region with f and g: 2 all-reduces of 500 bytes, 2 (t-1)/t = 1.
    assert tp.expected == 4 * 2 * 500 and tp.ratio == 2.0
    assert tp.symbols == "8 b s h (t-1)/t a layer, a micro-batch"
    dp, pp = found["dp", "all_reduce"], found["pp", "send"]
    assert dp.wire == dp.expected == 4000 and dp.symbols == "2 psi (n-1)/n"
    assert pp.wire == pp.expected == 4 * 500 and pp.calls == 4
    world = found["pp x dp x tp", "all_reduce"]
    assert world.expected is world.ratio is None and world.symbols == ""
    # The table has as many bytes as the matrix.
    matrix = timeline.comm_matrix()
    for axis in matrix.axes:
        sent = sum(row.wire for row in found.values() if row.axis == axis)
        assert matrix.by_axis[axis].sum() == pytest.approx(8 * sent)
    text = str(timeline.comm_volume())
    assert "8 b s h (t-1)/t a layer, a micro-batch" in text and "2.000" in text
    html = timeline.comm_volume(3)._repr_html_()
    assert "What rank 3 sends, in step 0" in html and "partial sums forward" in html

"""Charts, and the pictures made of them: memory, bytes, predictions, placements, waits."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import nan
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mpkit as mk
from mpkit.common.display import draw
from mpkit.devices.hardware import wire_factor
from mpkit.models import GPT
from mpkit.plan.mesh import Mesh
from mpkit.strategies.placement.placement import place
from mpkit.timeline.replay import Replay
from mpkit.timeline.traffic import VolumeRow, sent_to
from mpkit.trace import CATEGORIES, MEMORY, OP, Kind, RankTrace
from mpkit.trace.metrics import Metrics
from mpkit.views.chart.chart import Chart, Panel, Series, chart_text
from mpkit.views.chart.figure import chart_figure
from mpkit.views.chart.svg import chart_svg
from mpkit.views.memory.charts import memory_over_time
from mpkit.views.memory.series import memory_of
from mpkit.views.placement.text import divided_layers
from mpkit.views.results.losses import losses
from mpkit.views.timeline.picture import picture
from mpkit.views.timeline.svg import svg
from mpkit.views.timeline.widget import TimelineView
from tests.words import unwrapped

# ---- Charts as data, and what SVG, plotly and text show of them: the same numbers.

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


# ---- Memory over time, and its picture.


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


# ---- How much a rank sends, beside what the formulas of the papers say.

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


# ---- Who sends how much to whom: matrices by axis.

RINGS = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
ROOTED = (Kind.BROADCAST, Kind.REDUCE, Kind.SCATTER, Kind.GATHER)


def test_three_dimensions_have_a_matrix_each(meshed: Meshed) -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    matrix = meshed(mesh).comm_matrix()
    assert matrix.axes == ["pp", "dp", "tp", "pp x dp x tp"]
    # 4 micro-batches, forward and backward, each an all-reduce of 1000 bytes between two: 2 (n-1)/n = 1.
    tp = np.zeros((8, 8))
    for rank in range(8):
        tp[rank, rank ^ 1] = 8 * 1000
    assert np.array_equal(matrix.by_axis["tp"], tp)
    # Messages go there and come back.
    pp = np.zeros((8, 8))
    for rank in range(4):
        pp[rank, rank + 4] = pp[rank + 4, rank] = 4 * 500
    assert np.array_equal(matrix.by_axis["pp"], pp)
    assert matrix.by_axis["dp"][0, 2] == matrix.by_axis["dp"][2, 0] == 4000
    # The world's ring passes every rank.
    assert [(int(row.argmax()), row.sum()) for row in matrix.by_axis["pp x dp x tp"]] == [
        ((rank + 1) % 8, 2 * 7 / 8 * 8) for rank in range(8)
    ]
    assert np.array_equal(matrix.bytes, sum(matrix.by_axis.values()))


@given(n=st.integers(2, 9), kind=st.sampled_from((*RINGS, *ROOTED, Kind.ALL_TO_ALL)), data=st.data())
def test_what_ranks_send_is_what_the_wire_factors_say(n: int, kind: Kind, data: st.DataObject) -> None:
    members = tuple(sorted(data.draw(st.sets(st.integers(0, 20), min_size=n, max_size=n))))
    root = data.draw(st.sampled_from(members))
    sent = {rank: list(sent_to(kind, members, rank, root)) for rank in members}
    for rank, to in sent.items():
        assert all(other in members and other != rank for other, _ in to)
        if kind in (*RINGS, Kind.ALL_TO_ALL):
            assert sum(share for _, share in to) == pytest.approx(wire_factor(kind, n))
    # With a root: whatever has to reach everybody, or to come from everybody.
    whole = sum(share for to in sent.values() for _, share in to)
    if kind in ROOTED:
        assert whole == pytest.approx(n - 1 if kind in (Kind.BROADCAST, Kind.REDUCE) else (n - 1) / n)
    assert not list(sent_to(Kind.BARRIER, members, root))


def test_text_svg_and_chart_show_the_same(meshed: Meshed) -> None:
    matrix = meshed(Mesh(pp=2, tp=2)).comm_matrix()
    text = str(matrix)
    assert "tp: 32.0 kB, 4 pairs" in text
    assert "kB  0  1  2  3\n 0  ·  8  ·  ·\n 1  8  ·  ·  ·\n" in text
    root = ElementTree.fromstring(matrix.to_svg())
    cells = root.findall(".//{http://www.w3.org/2000/svg}rect/{http://www.w3.org/2000/svg}title")
    assert "rank 0 (pp0 tp0) to rank 1 (pp0 tp1): 8.00 kB along tp" in [cell.text for cell in cells]
    figure = matrix.figure()
    assert [trace.type for trace in figure.data] == ["heatmap"] * 3
    assert figure.data[1].z[0][1] is not None and figure.data[1].z[0][0] is None
    assert "rank 0 (pp0 tp0) to rank 1 (pp0 tp1)" in figure.data[1].customdata[0][1]
    assert matrix._repr_mimebundle_()["text/plain"] == text
    one = meshed(Mesh(tp=2)).comm_matrix().figure()
    assert "cells in kB" in one.layout.annotations[0].text  # a number has its unit, with one axis too


# ---- Pictures of what is predicted, of long runs and of somebody else's traces: each says what its numbers say.

ASKED = {"global_batch": 8, "sequence": 4096}
PLAN = mk.Plan.zero(3, 8, precision="bf16")


def drawn_words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("machine", ["8x-a100-nvlink", "8x-rtx-4090"])
def test_the_picture_of_fits_has_the_numbers_of_its_text_in_one_unit(machine: str) -> None:
    found = mk.fits("llama3-8b", PLAN, machine, **ASKED)
    picture, text = draw(found, "svg"), str(found)
    (needed,) = re.findall(r": ([\d.]+ of [\d.]+ GiB) on rank 0", unwrapped(text))
    words = drawn_words(picture)
    assert words[0].startswith(f"llama3-8b {'fits' if found else 'does not fit'} {machine}: ")
    assert ("What would fit" if not found else "The largest batch that fits") in " ".join(words)
    assert f"band {found.relative_band:.0%}" in " ".join(words)
    assert sum(each.startswith(f"{needed}, ") for each in words) == 1  # at its bar
    for number, category in re.findall(r" +([\d.]+) GiB  (\w+):", text):
        assert f"{category} {number} GiB" in words
    assert not re.search(r"\d (GB|MB)\b", "".join(words))
    over = re.findall(r'class="over"', picture)
    assert len(over) == (0 if found else 1)


def test_an_estimate_is_a_picture_in_a_notebook_with_the_numbers_of_its_text() -> None:
    found = mk.estimate("llama3-8b", PLAN, "8x-a100-nvlink", **ASKED)
    bundle = found._repr_mimebundle_()
    assert bundle["text/plain"] == str(found) and bundle["text/html"].startswith("<img alt=")
    words = drawn_words(draw(found, "svg"))
    assert all(
        number in "".join(words) for number in re.findall(r"[\d.,]+ (?:ms|s|tokens/s|TFLOP/s)\b", str(found))
    )
    (because,) = (line for line in str(found).splitlines() if line.startswith("because"))
    for cause, share in re.findall(r"(?:^because +|, )([\w -]+) ([\d.]+ %)", because):
        assert any(each.startswith(cause) and each.endswith(f", {share}") for each in words), cause


# ---- Which rank holds what, on which node, and who talks to whom over which link.

SVG = "{http://www.w3.org/2000/svg}"
STAGES = [["embed", "block0", "block1"], ["block2", "block3", "head"]]
SHARDS = {
    f"block{i}.mlp.{name}.{kind}": parts
    for i in range(4)
    for name, kind, parts in (
        ("up", "weight", ["rows 0-3", "rows 4-7"]),
        ("up", "bias", ["elements 0-3", "elements 4-7"]),
        ("down", "weight", ["columns 0-3", "columns 4-7"]),
    )
}
NODES = replace(mk.hardware("2x8-h100-ib"), per_node=4)


def test_three_dimensions_on_two_nodes() -> None:
    found = place(Mesh(pp=2, dp=2, tp=2), STAGES, SHARDS, NODES)
    assert found.nodes == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert found.layers_of(3) == STAGES[0] and found.layers_of(4) == STAGES[1]
    assert found.part("block2.mlp.up.weight", 5) == "rows 4-7" and found.part("head", 5) == ""
    assert found.to_svg().count("block0.mlp.up.weight: rows 0-3") == 2  # of ranks 0 and 2
    assert [(talk.axis, talk.crosses, talk.link and talk.link.name) for talk in found.talks] == [
        ("tp", False, "NVLink 4"),
        ("dp", False, "NVLink 4"),
        ("pp", True, "InfiniBand NDR, a card a GPU"),
    ]
    assert found.talks[0].groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    # Numbers in which layers differ are stars, and biases go with their weights.
    assert divided_layers(found) == [
        ("block*.mlp.up", ["rows 0-3", "rows 4-7"]),
        ("block*.mlp.down", ["columns 0-3", "columns 4-7"]),
    ]
    text = str(found)
    assert text.startswith("pp 2 x dp 2 x tp 2 = 8 ranks, on 2 nodes of 4 H100 SXM")
    assert "  rank 4   pp1 dp0 tp0   block2 to 3, head" in text
    assert "  pp  (0 4) (1 5) (2 6) (3 7), InfiniBand NDR, a card a GPU between nodes" in text


def test_of_a_plan_and_a_model() -> None:
    model = GPT(layers=4, width=16, heads=2)
    model.add_module("none", nn.ModuleList())
    found = mk.Plan.gpipe(2, 4, cut=["block2"]).placement(model, hardware="8x-h100-nvlink")
    assert found.stages == (("embedding", "block0", "block1"), ("block2", "block3", "head"))
    assert found.notes == ()
    assert "balanced by their parameters" in mk.Plan.gpipe(2, 4).placement(model).notes[0]
    # A rank with several stages has the layers of each; without a model, only who talks to whom.
    looped = mk.Plan.pipeline("interleaved_1f1b", 2, 4, virtual_stages=2, cut=[1, 2, 3])
    assert looped.placement(model).layers_of(0) == ["embedding", "block1"]
    bare = mk.Plan.ddp(4).placement()
    assert bare.layers_of(0) == [] and [talk.axis for talk in bare.talks] == ["dp"]
    assert mk.Plan.serial().placement().talks == []
    with pytest.raises(ValueError, match="16 ranks, and it has 8 devices"):
        mk.Plan.ddp(16).placement(hardware="8x-h100-nvlink")


# ---- Pictures of ranks that hang show the wait itself, and for whom it is.


def stuck(kind: Kind, group: int, peer: int = -1) -> np.ndarray:
    """A rank's records: a second of compute, a communication, and the wait for it that never ended."""
    ops = np.zeros(3, OP)
    ops["kind"], ops["lane"] = [Kind.COMPUTE, kind, Kind.WAIT], [0, 1, 0]
    ops["start"], ops["end"] = [1, int(1e9), int(1e9)], [int(1e9), 0, 0]
    ops["cpu"] = [int(1e9), 0, 0]
    ops["ref"], ops["group"], ops["peer"] = [-1, -1, 1], [0, group, 0], [-1, peer, -1]
    ops["stage"], ops["microbatch"], ops["step"] = -1, -1, -1
    return ops


def hung() -> mk.Timeline:
    replay = Replay(3)
    for rank, ops in enumerate([stuck(Kind.RECV, 1, peer=1), *[stuck(Kind.ALL_REDUCE, 2)] * 2]):
        replay.feed(rank, RankTrace(ops, np.zeros(0, MEMORY), ["", "1>0#0", "0,1,2"]))
    replay.finish()
    return mk.Timeline(**vars(replay.collect()))


def test_each_wait_names_who_never_came() -> None:
    timeline = hung()
    assert [(each["rank"], each["words"]) for each in timeline.meta["waiting"]] == [
        (0, "waits for rank 1 (recv)"),
        (1, "waits for rank 0 (all reduce)"),
        (2, "waits for rank 0 (all reduce)"),
    ]


def test_the_wait_is_drawn_to_the_edge() -> None:
    timeline = hung()
    pic = picture(timeline)
    assert {wait.start for wait in pic.waits} == {pic.waits[0].start}
    assert pic.duration > max(wait.start for wait in pic.waits)
    drawn = svg(timeline)
    assert drawn.count("stroke-dasharray") == 3 and ">waits for rank 1" in drawn
    assert "rank 2 waits for rank 0 (all reduce)" in drawn
    view = TimelineView(timeline)
    assert view.waits == timeline.meta["waiting"] and view.room >= pic.duration

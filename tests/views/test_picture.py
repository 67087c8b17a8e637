"""Timeline -> Picture."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.timeline import metrics
from mpkit.timeline.replay.spans import HELD, SPAN
from mpkit.trace import Kind
from mpkit.views.drawing.colours import INKS, Key
from mpkit.views.theme import THEMES
from mpkit.views.timeline.coverage import coverage, strongest
from mpkit.views.timeline.idle import subtract_spans
from mpkit.views.timeline.picture import BOX, picture


def test_a_lane_a_gpu_with_the_idle_time_as_boxes() -> None:
    pic = picture(mk.simulate(mk.Plan.gpipe(4, 8)))
    assert [row.label for row in pic.rows] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    for rank in range(4):
        mine = pic.of_row(rank)
        assert (mine["key"] == Key.FORWARD).sum() == (mine["key"] == Key.BACKWARD).sum() == 8
        idle = mine[mine["key"] == Key.IDLE]
        assert (idle["end"] - idle["start"]).sum() == pytest.approx(9.0)
        assert pic.idle_share(rank) == pytest.approx(3 / 11)
        # Together they fill the step without overlap.
        assert np.allclose(mine["start"][1:], mine["end"][:-1])
    assert pic.figures["bubble"] == "27.3 %"


def test_thin_rows_appear_where_there_is_something_in_them(data_parallel: mk.Timeline) -> None:
    pic = picture(data_parallel)
    assert [(row.rank, row.part) for row in pic.rows] == [
        (rank, part) for rank in range(2) for part in ("compute", "layers", "comm", "host")
    ]
    assert pic.rows[0].label == "rank 0 (CPU)"
    assert {box["key"] for box in pic.of_row(1)} == {Key.FORWARD}
    # A layer within an action is not counted again: 6.5 of 8 seconds are busy.
    assert pic.idle_share(0) == pytest.approx(1.5 / 8)


def test_ranks_replayed_on_a_machine_with_gpus_are_gpus(data_parallel: mk.Timeline) -> None:
    other = replace(data_parallel, meta={**data_parallel.meta, "hardware": "8x-a100-nvlink"})
    assert picture(other).rows[0].label == "GPU 0"


def test_the_hover_text_of_idle_time_says_what_was_waited_for(data_parallel: mk.Timeline) -> None:
    pic = picture(data_parallel)
    idle = [box for box in pic.of_row(0) if box["key"] == Key.IDLE]
    text = pic.hover(idle[0])
    assert text.startswith("idle for 1.00 s")
    assert "waited for rank 0 (CPU): all reduce" in text


def test_a_hover_text_has_the_facts(data_parallel: mk.Timeline) -> None:
    pic = picture(data_parallel)
    reduce = pic.of_row(2)[0]
    assert (
        pic.hover(reduce) == "all reduce · micro-batch 0 · stage 0 · step 0\nfrom 4.00 s, for 3.00 s\n498 MB"
    )


def test_of_an_action_that_waits_the_longest_piece_has_the_number(gpipe: mk.Timeline) -> None:
    works = gpipe.spans[(gpipe.spans["kind"] == Kind.FORWARD) & (gpipe.spans["rank"] == 1)]
    waits = np.repeat(works, 2)
    waits["kind"], waits["depth"] = Kind.WAIT, 1
    waits["start"][::2], waits["end"][::2] = works["start"] + 0.1, works["start"] + 0.3
    waits["start"][1::2], waits["end"][1::2] = works["start"] + 0.8, works["start"] + 0.9
    spans = np.concatenate([gpipe.spans, waits])
    spans["cause"] = -1
    cut = picture(replace(gpipe, spans=spans[np.lexsort((spans["start"], spans["rank"]))]))
    mine = cut.of_row(2)  # rank 1's compute
    forwards = mine[mine["key"] == Key.FORWARD]
    assert len(forwards) == 3 * 8
    assert [cut.label(box) for box in forwards[:6]] == ["", "0", "", "", "1", ""]
    assert (forwards["end"] - forwards["start"]).sum() == pytest.approx(8 * 0.7)
    # Those that do not wait are as they were.
    other = cut.of_row(0)
    assert [cut.label(box) for box in other[other["key"] == Key.FORWARD]] == list("01234567")


@given(
    bounds=st.lists(st.integers(0, 60), min_size=4, max_size=14, unique=True),
    action=st.tuples(st.integers(0, 59), st.integers(1, 20)),
)
def test_pieces_are_what_is_outside_of_the_waits(bounds: list[int], action: tuple[int, int]) -> None:
    ordered = sorted(bounds)[: len(bounds) // 2 * 2]
    spans = np.zeros(1 + len(ordered) // 2, SPAN)
    spans["kind"], spans["depth"] = Kind.WAIT, 1
    spans["start"][1:], spans["end"][1:] = ordered[::2], ordered[1::2]
    spans["kind"][0], spans["depth"][0] = Kind.FORWARD, 0
    spans["start"][0], spans["end"][0] = action[0], action[0] + action[1]
    spans["cause"] = -1
    pic = picture(mk.Timeline(spans, [""], np.zeros(0, HELD), 1, "virtual"))
    drawn = pic.boxes[pic.boxes["key"] == Key.FORWARD]
    want = subtract_spans(metrics.covered_times(spans[1:]), np.array([[action[0], sum(action)]], float))
    found = np.stack([drawn["start"], drawn["end"]], axis=1) + pic.origin
    assert found.tolist() == want.tolist()
    assert drawn["named"].sum() == (len(want) > 0)
    longest = drawn[drawn["named"]]
    assert all(longest["end"] - longest["start"] == max(drawn["end"] - drawn["start"], default=0))


def test_one_step_of_several(long_run) -> None:
    timeline = long_run(500)
    assert [mark.text for mark in picture(timeline).marks][:2] == ["step 0", "step 1"]
    one = picture(timeline, step=2)
    assert one.duration == pytest.approx(timeline.step_time)
    assert one.marks == []


def test_a_step_that_is_not_complete_has_no_figures_but_a_picture(gpipe: mk.Timeline) -> None:
    cut = replace(gpipe, spans=gpipe.spans[(gpipe.spans["end"] < 5) & (gpipe.spans["kind"] < 128)])
    assert len(picture(cut).boxes) > 4


def test_coverage_of_pixels() -> None:
    boxes = np.zeros(3, BOX)
    boxes["key"] = [Key.FORWARD, Key.FORWARD, Key.BACKWARD]
    boxes["start"], boxes["end"] = [0.0, 2.5, 3.25], [1.5, 2.75, 4.0]
    cover = coverage(boxes, 4, 4.0)
    assert cover[Key.FORWARD].tolist() == [1.0, 0.5, 0.25, 0.0]
    assert cover[Key.BACKWARD].tolist() == [0.0, 0.0, 0.0, 0.75]
    keys, busy = strongest(cover)
    assert keys.tolist() == [1, 1, 1, 2]
    assert busy.tolist() == [1.0, 0.5, 0.25, 0.75]


# ---------------------------------------------------------------- colours


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.1's contrast ratio."""
    bright, dark = sorted((float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear sRGB, under D65."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    f = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 1e-6))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Machado, Oliveira and Fernandes 2009, table 1, severity 1.0.
SIGHT = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}
# What lies next to each other in a compute lane.
COMPUTE = [key for key in INKS if key not in (Key.COMM, Key.COPY, Key.IDLE)]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_told_apart_by_everybody(sight: str, theme: str) -> None:
    seen = {
        key: lab(np.clip(SIGHT[sight] @ linear(getattr(INKS[key], theme)), 0, 1))
        for key in [*COMPUTE, Key.COMM]
    }
    near = {(a.name, b.name): np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(seen, 2)}
    # Ten is a difference that one sees at a glance (2.3 is just noticeable).
    assert min(near.values()) > 10, min(near.items(), key=lambda item: item[1])


@pytest.mark.parametrize("theme", THEMES)
def test_numbers_are_readable_on_their_colours_and_words_on_the_ground(theme: str) -> None:
    for key in COMPUTE:
        assert contrast(getattr(INKS[key], theme), getattr(INKS[key], f"on_{theme}")) > 4.5, key
    ground = THEMES[theme]
    assert contrast(ground.text, ground.ground) > 7
    assert contrast(ground.faint, ground.ground) > 4.5


@pytest.mark.parametrize("stages", [[["wte", "h.0", "h.1"], ["h.2", "head"]], [["wte"], 7], [[b"h"], []]])
def test_hovering_tells_the_layers_of_a_stage(stages: list[object]) -> None:
    """Nothing is said where a trace that somebody has made up names no layers."""
    timeline = mk.simulate(mk.Plan.gpipe(2, 2))
    pic = picture(replace(timeline, meta={**timeline.meta, "stages": stages}))
    told = [pic.hover(pic.of_row(row)[pic.of_row(row)["key"] == Key.FORWARD][0]) for row in (0, 1)]
    words = ["layers wte, h.0 to 1", "layers h.2, head"] if stages[1] == ["h.2", "head"] else []
    assert [line for lines in told for line in lines.splitlines() if line.startswith("layers")] == words

"""Timeline -> Picture."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.timeline import metrics
from mpkit.timeline.replay.spans import HELD, SPAN
from mpkit.trace import Kind
from mpkit.views.drawing.colours import Key
from mpkit.views.timeline.picture import picture, subtract_spans


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


def test_the_hover_text_of_idle_time_says_what_was_waited_for(data_parallel: mk.Timeline) -> None:
    pic = picture(data_parallel)
    idle = [box for box in pic.of_row(0) if box["key"] == Key.IDLE]
    text = pic.hover(idle[0])
    assert text.startswith("idle for 1.00 s")
    assert "waited for rank 0 (CPU): all reduce" in text


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

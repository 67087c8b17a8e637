"""Batches for a browser, and the bubble counted from them."""

from __future__ import annotations

import numpy as np
import pytest

import mpkit as mk
from mpkit.views.drawing.colours import Key
from mpkit.views.timeline.bubble_count import BubbleCounter
from mpkit.views.timeline.wire import SpanBatches, look
from tests.wire import unpack


def test_columns_come_back_as_they_went(gpipe: mk.Timeline) -> None:
    batches = SpanBatches()
    batches.add(gpipe.spans, gpipe.names)
    ((head, buffer),) = batches.messages_since(0, {0: (0.0, 34.5)})
    columns = unpack(buffer, head["count"])
    for name in ("start", "rank", "stage", "microbatch", "step", "kind", "lane", "cause"):
        assert np.array_equal(columns[name], gpipe.spans[name]), name
    assert head["names"] == gpipe.names
    assert head["steps"] == [[0, 0.0, 34.5]]


@pytest.mark.parametrize("first", [0, 1, 700, 999])
def test_who_has_some_gets_the_rest(long_run, first: int) -> None:
    spans = long_run(1000).spans[:1000]
    batches = SpanBatches()
    for at in range(0, 1000, 137):
        batches.add(spans[at : at + 137], [""])
    assert np.array_equal(batches.spans, spans)
    starts, expected = [], first
    for head, buffer in batches.messages_since(first, {}, most=100):
        assert head["first"] == expected and head["count"] <= 100
        expected += head["count"]
        starts.append(unpack(buffer, head["count"])["start"])
    assert expected == 1000
    assert np.array_equal(np.concatenate(starts), spans["start"][first:])


@pytest.mark.parametrize("plan", [mk.Plan.gpipe(4, 8), mk.Plan.gpipe(4, 1), mk.Plan.gpipe(2, 3)])
def test_the_bubble_counted_in_batches_is_the_timelines(plan: mk.Plan) -> None:
    timeline = mk.simulate(plan, hop=0.3)
    in_time = timeline.spans[np.argsort(timeline.spans["start"], kind="stable")]
    counter = BubbleCounter(timeline.world_size)
    for at in range(0, len(in_time), 7):
        counter.add(in_time[at : at + 7])
    assert counter.bubble() == pytest.approx(timeline.bubble)
    assert counter.step_time() == pytest.approx(timeline.step_time)
    assert counter.complete == 0


def test_the_browser_gets_every_colour() -> None:
    assert len(look()["inks"]) == len(Key)
    assert look()["kinds"]["34"] == "all reduce"

"""The live widget's Python half: what its traits hold. Its other half is tested in tests/browser."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import mpkit as mk
from mpkit.timeline.replay.spans import SPAN
from mpkit.views.timeline.widget import MOST, STEPS, TimelineView
from mpkit.views.timeline.wire import COLUMNS


def unpack(buffer: bytes, count: int) -> dict[str, Any]:
    """The columns of a buffer, as the browser reads them."""
    columns, at = {}, 0
    for name, code in COLUMNS:
        columns[name] = np.frombuffer(buffer, code, count, at)
        at += columns[name].nbytes
    return columns


def shown(view: TimelineView) -> dict[str, Any]:
    return unpack(view.spans, view.spans_head["count"])


def test_a_timeline_is_shown_with_its_figures(gpipe: mk.Timeline) -> None:
    view = TimelineView(gpipe, title="GPipe")
    assert np.array_equal(shown(view)["start"], gpipe.spans["start"])
    assert view.spans_head["names"] == gpipe.names
    assert view.labels == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert view.bubble == gpipe.bubble and view.step_time == gpipe.step_time
    assert "simulated" in view.clock
    assert view.table["rows"][0][:2] == ["GPU 0", "30.4 %"]


def test_spans_of_many_threads_are_one_picture() -> None:
    view = TimelineView(labels=["GPU 0", "GPU 1"])
    changes: list[Any] = []
    view.observe(changes.append, "spans_head")

    def feed(rank: int) -> None:
        for i in range(500):
            span = np.zeros(1, SPAN)
            span["rank"], span["kind"], span["start"], span["end"] = rank, 1, i, i + 0.5
            view.append(span)

    threads = [threading.Thread(target=feed, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    view.flush()
    assert sorted(shown(view)["start"]) == sorted(2 * list(range(500)))
    assert len(changes) < 200
    assert view.bubble == 1 - 500 * 0.5 / 499.5
    assert [row[0] for row in view.table["rows"]] == ["GPU 0", "GPU 1"]


def test_of_a_run_that_goes_on_the_newest_steps_are_kept(long_run) -> None:
    timeline = long_run(40_000)
    spans = timeline.spans[np.argsort(timeline.spans["end"], kind="stable")]
    view = TimelineView(labels=["GPU 0"] * 4)
    for part in np.array_split(spans, 30):
        view.append(part, timeline.names)
    view.flush()
    head, columns = view.spans_head, shown(view)
    assert head["first"] + head["count"] == len(spans) and STEPS <= len(head["steps"]) < 200
    assert np.array_equal(columns["start"], spans["start"][head["first"] :])
    assert head["origin"] == spans["start"].min() and head["count"] < MOST
    view.replace(timeline)
    assert view.spans_head["first"] == 0 and view.spans_head["count"] == len(spans)


@pytest.mark.parametrize("plan", [mk.Plan.gpipe(4, 8), mk.Plan.gpipe(4, 1), mk.Plan.gpipe(2, 3)])
def test_the_live_figures_are_the_final_ones(plan: mk.Plan) -> None:
    timeline = mk.simulate(plan, hop=0.3)
    view = TimelineView(labels=[""] * timeline.world_size)
    for part in np.array_split(timeline.spans[np.argsort(timeline.spans["start"], kind="stable")], 7):
        view.append(part, timeline.names)
    view.flush()
    assert view.bubble == pytest.approx(timeline.bubble) and view.step_time == timeline.step_time

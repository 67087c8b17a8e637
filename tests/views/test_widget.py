"""The live widget's Python half: what its traits hold. Its other half is tested in tests/browser."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import mpkit as mk
from mpkit.timeline.replay.spans import SPAN
from mpkit.views.drawing.colours import Key
from mpkit.views.timeline.widget import MOST, STEPS, TimelineView
from mpkit.views.timeline.wire import COLUMNS, look, pack_spans


def unpack(buffer: bytes, count: int) -> dict[str, Any]:
    """The columns of a buffer, as the browser reads them."""
    columns, at = {}, 0
    for name, code in COLUMNS:
        columns[name] = np.frombuffer(buffer, code, count, at)
        at += columns[name].nbytes
    return columns


def shown(view: TimelineView) -> dict[str, Any]:
    return unpack(view.spans, view.spans_head["count"])


def test_columns_come_back_as_they_went(gpipe: mk.Timeline) -> None:
    head, buffer = pack_spans(gpipe.spans, gpipe.names)
    columns = unpack(buffer, head["count"])
    for name in ("start", "rank", "stage", "microbatch", "step", "kind", "lane", "cause"):
        assert np.array_equal(columns[name], gpipe.spans[name]), name
    assert head["names"] == gpipe.names and head["steps"] == [[0, 0.0, 34.5]]
    later, rest = pack_spans(gpipe.spans[50:], gpipe.names, first=50)
    causes = gpipe.spans["cause"][50:]
    assert np.array_equal(unpack(rest, later["count"])["cause"], np.where(causes >= 50, causes - 50, -1))
    assert len(look()["inks"]) == len(Key) and look()["kinds"]["34"] == "all reduce"


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


def test_figures_are_of_the_last_complete_step_unless_one_can_watch_the_newest(long_run) -> None:
    timeline = long_run(1000)
    spans = timeline.spans[np.argsort(timeline.spans["end"], kind="stable")]
    view = TimelineView(labels=["GPU 0"] * 4)
    view.append(spans[spans["end"] < 20], timeline.names)
    view.flush()
    assert view.of == "step 0 so far"
    view.append(spans[(spans["end"] >= 20) & (spans["end"] < 40)], timeline.names)
    view.flush()
    first = timeline.step(0)
    assert (view.of, view.bubble, view.step_time) == ("step 0", first.bubble, first.step_time)
    view._newest = (1, view._newest[1] - 2)  # as if step 1 had begun two seconds earlier
    view.append(spans[(spans["end"] >= 40) & (spans["end"] < 50)], timeline.names)
    view.flush()
    assert view.of == "step 1 so far" and view.bubble != timeline.step(0).bubble
    view.replace(timeline)
    assert view.of == "step 4"


@pytest.mark.parametrize("plan", [mk.Plan.gpipe(4, 8), mk.Plan.gpipe(4, 1), mk.Plan.gpipe(2, 3)])
def test_the_live_figures_are_the_final_ones(plan: mk.Plan) -> None:
    timeline = mk.simulate(plan, hop=0.3)
    view = TimelineView(labels=[""] * timeline.world_size)
    for part in np.array_split(timeline.spans[np.argsort(timeline.spans["start"], kind="stable")], 7):
        view.append(part, timeline.names)
    view.flush()
    assert view.bubble == pytest.approx(timeline.bubble) and view.step_time == timeline.step_time


def test_an_output_has_a_picture_for_who_has_no_kernel(gpipe: mk.Timeline) -> None:
    data, _ = TimelineView(gpipe)._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["version_major"] == 2
    assert data["text/html"].startswith("<img alt=") and "data:image/svg+xml;base64," in data["text/html"]
    assert "GPU 0 │0░1░" in data["text/plain"]

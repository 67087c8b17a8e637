"""The live widget's Python half: batches, threads, hello. Its other half is tested in tests/browser."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import mpkit as mk
from mpkit.timeline.replay.spans import SPAN
from mpkit.views.timeline.widget import TimelineView
from tests.wire import unpack


class Overheard(TimelineView):
    """One whose messages are kept, as a browser would get them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.messages: list[tuple[dict[str, Any], bytes]] = []
        super().__init__(*args, **kwargs)

    def send(self, content: Any, buffers: Any = None) -> None:
        self.messages.append((content, buffers[0]))

    def hello(self, epoch: int = -1, have: int = 0) -> None:
        self._handle_custom_msg({"type": "hello", "epoch": epoch, "have": have}, [])


def received(messages: list[tuple[dict[str, Any], bytes]]) -> tuple[int, np.ndarray, list[str]]:
    """What a browser has after these: epoch, the spans' starts, names; by timeline.js's rules."""
    epoch, starts, names = -1, np.empty(0), [""]
    for head, buffer in messages:
        if head["epoch"] > epoch:
            epoch, starts, names = head["epoch"], np.empty(0), [""]
        if head["epoch"] == epoch:
            assert head["first"] <= len(starts), "a batch is missing"
            new = unpack(buffer, head["count"])["start"]
            starts = np.concatenate([starts[: head["first"]], new, starts[head["first"] + head["count"] :]])
            names[head["names_first"] :] = head["names"]
    return epoch, starts, names


def test_a_timeline_is_shown_with_its_figures(gpipe: mk.Timeline) -> None:
    view = Overheard(gpipe, title="GPipe")
    _, starts, names = received(view.messages)
    assert np.array_equal(starts, gpipe.spans["start"])
    assert names == gpipe.names
    assert view.labels == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert view.bubble == gpipe.bubble and view.step_time == gpipe.step_time
    assert "simulated" in view.clock
    assert view.table["rows"][0][:2] == ["GPU 0", "30.4 %"]


def test_batches_from_many_threads_go_out_as_few_messages() -> None:
    view = Overheard(labels=["GPU 0", "GPU 1"])

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
    _, starts, _ = received(view.messages)
    assert sorted(starts) == sorted(2 * list(range(500)))
    assert len(view.messages) < 100
    assert view.bubble == 1 - 500 * 0.5 / 499.5
    assert [row[0] for row in view.table["rows"]] == ["GPU 0", "GPU 1"]


def test_a_browser_that_says_hello_gets_what_it_lacks(long_run) -> None:
    spans = long_run(2000).spans
    view = Overheard(labels=["GPU 0"] * 4)
    view.append(spans[:1200], ["", "a"])
    view.append(spans[1200:], ["", "a", "b"])
    view.flush()
    for have in (0, 1200, 1999):
        before = len(view.messages)
        view.hello(epoch=0, have=have)
        (head, buffer), *rest = view.messages[before:]
        assert (head["first"], head["names"], rest) == (have, ["", "a", "b"], [])
        assert np.array_equal(unpack(buffer, head["count"])["start"], spans["start"][have:])
    # One that knows nothing, or something of another epoch, gets all; one that has all gets nothing.
    before = len(view.messages)
    view.hello(epoch=7, have=500)
    assert view.messages[before][0]["first"] == 0
    before = len(view.messages)
    view.hello(epoch=0, have=len(spans))
    assert len(view.messages) == before


def test_until_somebody_says_hello_everything_lies_in_the_backlog(long_run) -> None:
    spans = long_run(2000).spans
    view = Overheard(labels=["GPU 0"] * 4)
    view.append(spans, [""])
    assert (view.backlog_head["first"], view.backlog_head["count"]) == (0, len(spans))
    assert np.array_equal(unpack(view.backlog, len(spans))["start"], spans["start"])
    view.hello()
    assert view.backlog == b""
    view.append(spans[:5], [""])
    view.flush()
    assert view.backlog == b""


def test_figures_are_of_the_last_complete_step_unless_one_can_watch_the_newest(long_run) -> None:
    timeline = long_run(1000)
    spans = timeline.spans[np.argsort(timeline.spans["end"], kind="stable")]
    view = Overheard(labels=["GPU 0"] * 4)
    view.append(spans[spans["end"] < 20], timeline.names)
    view.flush()
    assert view.of == "step 0 so far"
    view.append(spans[(spans["end"] >= 20) & (spans["end"] < 40)], timeline.names)
    view.flush()
    assert (view.of, view.bubble) == ("step 0", timeline.step(0).bubble)
    view._newest = (1, view._newest[1] - 2)  # as if step 1 had begun two seconds earlier
    view.append(spans[(spans["end"] >= 40) & (spans["end"] < 50)], timeline.names)
    view.flush()
    assert view.of == "step 1 so far" and view.bubble != timeline.step(0).bubble
    view.replace(timeline)
    assert view.of == "step 4"


def test_an_output_has_a_picture_for_who_has_no_kernel(gpipe: mk.Timeline) -> None:
    data, _ = Overheard(gpipe)._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["version_major"] == 2
    assert data["text/html"].startswith("<img alt=") and "data:image/svg+xml;base64," in data["text/html"]
    assert "GPU 0 │0░1░" in data["text/plain"]

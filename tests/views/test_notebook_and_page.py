"""What a notebook and a page show: widget, dashboard, explorer, HTML."""

import json
import re
import threading
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch

import mpkit as mk
from mpkit.timeline.replay.spans import SPAN
from mpkit.trace.metrics import Metrics
from mpkit.trace.proof import Proof
from mpkit.views.dashboard.widget import Dashboard
from mpkit.views.page.html import html
from mpkit.views.timeline.widget import MOST, STEPS, TimelineView
from mpkit.views.timeline.wire import COLUMNS

# ---- The live widget's Python half: what its traits hold. Its other half is tested in tests/browser.


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


# ---- What a Run shows in a notebook, and the memory chart in it.

LABELS = [f"GPU {rank}" for rank in range(4)]


def board_of(title: str, timeline: mk.Timeline, on_stop: Any, theory: float | None = None) -> Dashboard:
    board = Dashboard(title, 4, steps=3)
    board.begin(replace(timeline, spans=timeline.spans[:0]), on_stop, theory)
    return board


def test_lanes_are_there_before_the_run_is_and_nothing_below_them_moves(gpipe: mk.Timeline) -> None:
    board = Dashboard("GPipe", 4, steps=9)
    assert len(board.timeline.labels) == 4 and "starting 4 processes" in board._head.value
    assert board._stop.disabled and board.timeline.tracks_head["tracks"]
    empty = board._charts.value
    assert "<img" in empty, "the losses have their place"
    board.begin(replace(gpipe, spans=gpipe.spans[:0]), lambda: None, theory=3 / 11)
    assert board.timeline.labels == LABELS and not board._stop.disabled and "27.3 %" in board.timeline.note
    board.add_spans(gpipe.spans, gpipe.names)
    board.set_charts([3.0, 2.0, 1.0], 0, Metrics())
    assert board._charts.value != empty and board._charts.value.count("<img") == empty.count("<img")


def test_a_run_from_its_start_to_its_end(gpipe: mk.Timeline) -> None:
    board = board_of("GPipe", gpipe, lambda: None, theory=3 / 11)
    assert "in theory" in board.timeline.note and "27.3 %" in board.timeline.note
    assert "running" in board.mimebundle()["text/plain"]
    board.add_spans(gpipe.spans[:100], gpipe.names)
    board.set_progress(2, [4.5, 4.25])
    board.set_memory(gpipe)
    board.add_output("[rank 1] hello")
    board.timeline.flush()
    assert board._bar.value == 2
    assert "4.2500" in board._words.value and "of 3" in board._words.value
    assert "[rank 1] hello" in board._output.value
    assert [rank for rank, _ in board.timeline.tracks_head["tracks"][0]["ranks"]] == [0, 1, 2, 3]
    board.finish(gpipe)
    assert board.timeline.bubble == gpipe.bubble and not board.timeline.live
    bundle = board.mimebundle()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == board.widget.model_id
    assert bundle["text/html"].count("<img alt=") == 2  # timeline and memory
    assert "GPU 0 │0░1░" in bundle["text/plain"]
    json.dumps(bundle)


def test_the_head_has_the_proof_in_words(gpipe: mk.Timeline) -> None:
    board = board_of("GPipe", gpipe, None)
    board.set_proof(Proof())
    assert "serial" not in board._head.value and "verified" not in board._head.value
    board.add_spans(gpipe.spans[:100], gpipe.names)
    board.set_proof(Proof((1, 2), 1e-9, 1e-9))
    assert (
        "running" in board._head.value and ">equal to serial training in steps 1 and 2<" in board._head.value
    )
    board.set_proof(Proof(why_not="<b>too large</b>"))
    board.finish(gpipe)
    for shown in (board._head.value, board.mimebundle()["text/html"]):
        assert "finished" in shown and ">not verified: &lt;b&gt;too large&lt;/b&gt;<" in shown


def test_a_failure_is_said_and_nothing_of_it_is_html(gpipe: mk.Timeline) -> None:
    hostile = "<script>alert(1)</script>"
    board = board_of(hostile, gpipe, lambda: None)
    board.add_output(hostile)
    board.finish(replace(gpipe, spans=gpipe.spans[:0]), f"rank 2 raised {hostile}", status="failed")
    for page in (
        board._trouble.value, board._head.value, board._output.value, board.mimebundle()["text/html"],
    ):  # fmt: skip
        assert "<script" not in page and "&lt;script&gt;" in page
    assert "failed" in board.mimebundle()["text/plain"]
    assert board._stop.layout.visibility == "hidden"


# ---- The schedule explorer, whose other half is tested in tests/browser.


def test_the_explorer_begins_as_asked_and_tells_where_no_script_runs_what_it_shows() -> None:
    explorer = mk.explore("gpipe", "F0 F1 B0 B1\nF0 B0 F1 B1", microbatches=2, ranks=2, hop=3)
    gpipe, own = explorer.sections
    assert '<option value="gpipe" selected>' in gpipe and '<option value="own" selected>' in own
    assert "F0 B0 F1 B1</textarea>" in own and 'value="3" data-unit="seconds"' in gpipe and 'max="3"' in gpipe
    bundle = explorer._repr_mimebundle_()[0]
    assert "15.0 s" in bundle["text/plain"] and bundle["text/html"].startswith("<img alt=")


@pytest.mark.parametrize(("schedules", "setting", "says"), [
    (("gpipe",), {"forward": "1"}, "forward='1': a time is a number of seconds"),
    (("gpipe",), {"ranks": 12}, r"the slider reaches 2 to 8; mk\.simulate"),
    (("gpip",), {}, "nearest is .*'gpipe'"),
    (("F0 F1 B0 B1\nB0 F0 F1 B1",), {}, "1B0 comes before 1F0"),
    (("gpipe",), {"forwards": 2}, "what can be set is ranks, microbatches, forward, input_grad"),
    ((mk.Plan.gpipe(2, 2),), {}, "a schedule's name or its rows as text"),
    (("gpipe",) * 3, {}, "two at most"),
])  # fmt: skip
def test_what_cannot_be_explored_says_why(schedules: Any, setting: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        mk.explore(*schedules, **setting)


# ---- The page that needs nothing else.


class Page(HTMLParser):
    """What a browser would load, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words: list[str] = []
        self._in: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loads += [
            found[name] or "" for name in ("src", "href", "srcset", "data", "action") if name in found
        ]
        self._in = tag if tag in ("script", "style") else None
        if tag == "script":
            self.scripts.append((found, ""))

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            attrs, text = self.scripts.pop()
            self.scripts.append((attrs, text + data))
        elif self._in is None:
            self.words.append(data)


def test_nothing_is_loaded(gpipe: mk.Timeline) -> None:
    text = html({"one": gpipe, "two": gpipe})
    page = Page(text)
    assert [load for load in page.loads if not load.startswith(("#", "data:,"))] == []
    assert not re.findall(r"@import|url\((?!#)|import\s*\(|\bfetch\b|XMLHttpRequest", text)
    assert {found for found in re.findall(r"https?://[^\"'\s)]+", text)} == {"http://www.w3.org/2000/svg"}


def test_the_summary_compares_strategies() -> None:
    naive, gpipe = (
        mk.simulate(mk.Plan.gpipe(4, 1), forward=8, input_grad=8, weight_grad=8),
        mk.simulate(mk.Plan.gpipe(4, 8)),
    )
    words = Page(html({"naive": naive, "GPipe": gpipe}, facts={"GPipe": {"in theory": "27.3 %"}})).words
    assert {"75.0 %", "27.3 %", "2.91 ×", "8 micro-batches", "in theory"} <= set(words)


def test_a_badge_says_whether_a_run_is_equal_to_serial_training(cluster: mk.Cluster) -> None:
    data = [(torch.randn(4, 2), torch.randn(4, 1))]
    how = {
        "loss": torch.nn.functional.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "steps": 2,
    }  # fmt: skip
    run = cluster.resized(1).train(torch.nn.Linear(2, 1), data, **how).wait()
    assert "equal to serial training in steps 1 and 2" in Page(html(run.timeline())).words
    assert not any("serial training" in words for words in Page(html(run.timeline("8x-h100-pcie"))).words)


def test_strings_stay_strings(hostile: mk.Timeline) -> None:
    name = "</script><script>alert(3)</script>"
    page = Page(html({name: hostile}, title=name, intro=name, facts={name: {name: name}}))
    kinds = [attrs.get("type") for attrs, _ in page.scripts]
    data, spans, slack = "application/json", "text/plain", "text/plain"
    assert kinds == [data, spans, slack, "application/json", "module"]
    (state,) = [json.loads(text)["state"] for attrs, text in page.scripts if "data-of" in attrs]
    assert state["note"] == hostile.notes[0]

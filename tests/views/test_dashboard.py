"""What a Run shows in a notebook, and the memory chart in it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import mpkit as mk
from mpkit.trace.metrics import Metrics
from mpkit.trace.proof import Proof
from mpkit.views.dashboard.widget import Dashboard
from mpkit.views.drawing.pace import TimeLeft

LABELS = [f"GPU {rank}" for rank in range(4)]


def board_of(title: str, labels: list[str], steps: int, on_stop: Any, **known: Any) -> Dashboard:
    board = Dashboard(title, labels, steps)
    board.begin(labels, on_stop, **known)
    return board


def test_lanes_are_there_before_the_run_is_and_nothing_below_them_moves(gpipe: mk.Timeline) -> None:
    board = Dashboard("GPipe", [f"rank {rank}" for rank in range(4)], steps=9)
    assert len(board.timeline.labels) == 4 and "starting 4 processes" in board._head.value
    assert board._stop.disabled and board.timeline.tracks_head["tracks"]
    empty = board._charts.value
    assert "<img" in empty, "the losses have their place"
    board.begin(LABELS, lambda: None, theory=3 / 11)
    assert board.timeline.labels == LABELS and not board._stop.disabled and "27.3 %" in board.timeline.note
    board.add_spans(gpipe.spans, gpipe.names)
    board.set_charts([3.0, 2.0, 1.0], 0, Metrics())
    assert board._charts.value != empty and board._charts.value.count("<img") == empty.count("<img")


def test_a_run_from_its_start_to_its_end(gpipe: mk.Timeline) -> None:
    board = board_of("GPipe", LABELS, steps=3, on_stop=lambda: None, theory=3 / 11)
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
    board = board_of("GPipe", LABELS, steps=3, on_stop=None)
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
    board = board_of(hostile, LABELS, steps=3, on_stop=lambda: None)
    board.add_output(hostile)
    board.finish(replace(gpipe, spans=gpipe.spans[:0]), f"rank 2 raised {hostile}", status="failed")
    for html in (
        board._trouble.value,
        board._head.value,
        board._output.value,
        board.mimebundle()["text/html"],
    ):
        assert "<script" not in html and "&lt;script&gt;" in html
    assert "failed" in board.mimebundle()["text/plain"]
    assert board._stop.layout.visibility == "hidden"


# ---------------------------------------------------------------- memory


def test_the_time_that_is_left_is_said_until_the_end(gpipe: mk.Timeline) -> None:
    board = board_of("GPipe", LABELS, steps=9, on_stop=None)
    now = iter([0.0, 40.0])
    board._time_left = TimeLeft(9, clock=lambda: next(now))
    for step in (3, 5):  # a training that was resumed after two steps
        assert " left" not in board._words.value
        board.set_progress(step, [4.5] * (step - 2))
    assert "about 1:20 left" in board._words.value  # 20 s per step, 4 steps
    board.finish(gpipe, "stopped", status="stopped")
    assert " left" not in board._words.value and "step <b>5</b> of 9" in board.mimebundle()["text/html"]

"""The figures of a timeline, by hand and in general."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.timeline import metrics
from mpkit.timeline.diagnosis.bubble_words import bubble_words
from mpkit.timeline.idleness import CAUSES, idle_by_cause
from mpkit.timeline.replay.spans import HELD, SPAN
from mpkit.timeline.simulation import followed_by
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES, MEMORY, OP, Kind, RankTrace, Trace, lane_of
from mpkit.views.timeline.widget import TimelineView

Span = tuple[int, Kind, float, float]  # rank, kind, start, end


def timeline(
    *rows: Span, step: int = -1, ranks: int = 2, held: Any = None, clock: str = "virtual", **columns: Any
) -> Timeline:
    spans = np.zeros(len(rows), SPAN)
    for row, (rank, kind, start, end) in enumerate(rows):
        spans[row]["rank"], spans[row]["kind"], spans[row]["lane"] = rank, kind, lane_of(kind)
        spans[row]["start"], spans[row]["end"] = start, end
    spans["step"], spans["cause"] = step, -1
    for column, value in columns.items():
        spans[column] = value
    return Timeline(spans, [""], np.zeros(0, HELD) if held is None else held, ranks, clock)


F, B, WAIT, SEND, RECV, REDUCE = Kind.FORWARD, Kind.BACKWARD, Kind.WAIT, Kind.SEND, Kind.RECV, Kind.ALL_REDUCE


def test_the_bubble_is_the_idle_share_of_the_step() -> None:
    t = timeline(
        (0, F, 1.0, 3.0), (0, WAIT, 3.0, 5.0), (0, B, 5.0, 9.0), (1, F, 3.0, 5.0), (1, SEND, 5.0, 17.0)
    )
    assert t.step_time == 16.0  # with what is sent afterwards
    assert t.busy == [6.0, 2.0]
    assert t.idle == [10.0, 14.0]
    assert t.utilisation == [0.375, 0.125]
    assert t.bubble == 0.75
    assert t.ideal_bubble == 3.0


def test_communication_is_exposed_where_nobody_computes_meanwhile() -> None:
    t = timeline(
        (0, F, 0.0, 4.0), (0, REDUCE, 1.0, 3.0), (0, REDUCE, 3.0, 6.0), (0, SEND, 5.0, 7.0), (0, B, 6.5, 8.0),
        (1, B, 0.0, 1.0),
    )  # fmt: skip
    assert t.comm_time == [6.0, 0.0]
    assert t.exposed_comm == [2.5, 0.0]
    assert t.overlap == pytest.approx(1 - 2.5 / 6)
    assert timeline((0, F, 0.0, 1.0)).overlap == 1.0


def test_figures_are_those_of_the_last_step_that_everybody_completed() -> None:
    rows: list[Span] = []
    steps = []
    for step in range(3):
        for rank in (0, 1):
            start = 10.0 * step
            rows.append((rank, F, start, start + 1 + step))
            steps.append(step)
            if (rank, step) != (1, 2):
                rows.append((rank, Kind.STEP, start - 3, start + 3 + step))
                steps.append(step)
    t = timeline(*rows, step=steps)  # type: ignore[arg-type]
    assert t.steps == [0, 1]
    assert t.step_time == 2.0  # not the wait for its first message, while others are in the step before
    assert t.step(0).step_time == 1.0
    assert t.step(2).step_time == 3.0  # as far as it came
    assert t.step(0).steps == [0]
    with pytest.raises(ValueError, match=r"step\(7\).*no step 7. It has steps 0, 1."):
        t.step(7)


def changes(*rows: tuple[float, int, str, int]) -> Any:
    held = np.zeros(len(rows), HELD)
    for row, (time, rank, category, total) in enumerate(rows):
        held[row] = (time, rank, CATEGORIES.index(category), total)
    return held


def test_each_category_has_its_own_peak_and_so_has_their_sum() -> None:
    held = changes(
        (0.0, 0, "params", 100), (1.0, 0, "activations", 50), (2.0, 0, "grads", 100), (2.5, 0, "activations", 10),
        (3.0, 0, "optimizer", 1000),
        (0.0, 1, "params", 7),
    )  # fmt: skip
    t = timeline((0, F, 0.0, 2.75), (1, F, 0.0, 1.0), held=held)
    assert t.peak_memory[0] == {
        "params": 100, "grads": 100, "optimizer": 0, "activations": 50, "buffers": 0, "total": 250,
    }  # fmt: skip
    assert t.peak_memory[1]["total"] == 7
    assert t.peak_memory_of_run[0]["total"] == 1210


def test_throughput_knows_the_batch_or_asks_for_it() -> None:
    t = timeline((0, F, 0.0, 4.0))
    assert t.throughput(samples=32) == 8.0
    with pytest.raises(ValueError, match="throughput\\(samples=32\\)"):
        t.throughput()
    t.meta["batch_size"] = 16
    assert t.throughput() == 4.0


COLUMNS = [
    "rank", "lane", "kind", "stage", "microbatch", "name", "start", "end", "bytes", "flops", "step", "depth",
]  # fmt: skip


def test_the_data_frame_has_a_row_for_what_each_lane_did() -> None:
    t = mk.simulate(mk.Plan.gpipe(2, 2), hop=0.5)
    frame = t.to_dataframe()
    assert list(frame.columns) == COLUMNS
    assert set(frame["lane"]) == {"compute", "comm"}
    assert set(frame["kind"]) == {"forward", "backward", "send", "recv"}
    assert set(t.to_dataframe(waits=True)["kind"]) == {"forward", "backward", "send", "recv", "wait"}
    work = frame[frame["lane"] == "compute"]
    busy = (work["end"] - work["start"]).groupby(work["rank"]).sum()
    assert busy.tolist() == t.busy


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(range(5)), st.integers(0, 99)), max_size=12),
       st.integers(0, 9), st.integers(0, 9))  # fmt: skip
def test_a_peak_is_never_less_than_what_was_held_at_any_time(
    rows: list[tuple[int, int, int]], start: int, length: int
) -> None:
    held = changes(
        *[
            (float(t), 0, CATEGORIES[category], total)
            for t, category, total in sorted(rows, key=lambda r: r[0])
        ]
    )
    peak = metrics.peak(held, [(start, start + length)])[0]
    levels = [0] * 5
    seen = []
    for change in held:
        if change["time"] >= start and not seen:
            seen.append(sum(levels))
        levels[change["category"]] = int(change["total"])
        if start <= change["time"] <= start + length:
            seen.append(sum(levels))
    assert peak["total"] == max(seen or [sum(levels)])


def test_there_is_one_length_of_a_step_even_where_it_ends_in_communication() -> None:
    """A step that ends with an all-gather (ZeRO-1's, a late bucket): all that is said of it adds up to its time."""
    t = followed_by(
        mk.simulate(mk.Plan.gpipe(2, 2)), [("o", Kind.OPTIMIZER, 1.0), ("g", Kind.ALL_GATHER, 5.0)]
    )
    assert t.step_time == 15.0
    assert sum(t.because.values()) == pytest.approx(15.0)
    assert np.allclose(np.add(t.busy, t.idle), 15.0)
    live = TimelineView(labels=["GPU 0", "GPU 1"])
    live.append(t.spans, t.names)
    live.flush()
    assert live.step_time == 15.0 and live.bubble == pytest.approx(t.bubble)
    whole, *parts = [float(share) for share in re.findall(r"([\d.]+) %", bubble_words(0.1, t))[1:]]
    assert whole == pytest.approx(100 * t.bubble, abs=0.05) == pytest.approx(sum(parts), abs=0.11)
    causes = dict(zip(CAUSES, idle_by_cause(t).mean(axis=0).tolist(), strict=True))
    assert causes["communication"] == pytest.approx(5.0)


def test_what_is_assumed_of_the_runs_own_machine_is_said_once() -> None:
    """The sentence on the loopback link stood below every picture; a machine that was asked for has its own."""
    ops = np.zeros(1, OP)
    ops["kind"], ops["start"], ops["end"], ops["cpu"] = Kind.FORWARD, 1, 9, 8
    for column in ("stage", "microbatch", "step", "number", "peer", "ref"):
        ops[column] = -1
    rank = RankTrace(ops, np.zeros(0, MEMORY), [""])
    own = Trace([rank, rank], {"world_size": 2, "device": "cpu", "hardware": "cpu"})
    assert not any("messages over" in note for note in mk.Timeline.of(own, clock="virtual").notes)
    assert "a link model" in mk.Timeline.of(own, clock="virtual").basis.assumed
    assert any("messages over" in note for note in mk.Timeline.of(own, "cpu").notes)


def test_a_rank_that_waits_for_what_another_computes_depends_on_it() -> None:
    """It was called "message" where messages take no time."""
    causes = mk.simulate(mk.Plan.gpipe(4, 8)).because
    assert causes["idle: dependency"] == 4.5 and "idle: communication" not in causes

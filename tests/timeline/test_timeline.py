"""The figures of a timeline, by hand and in general."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import mpkit as mk
from mpkit.launch.session.run import Run
from mpkit.prediction.experiments.factors import SPLIT, Factors, scale_trace
from mpkit.prediction.experiments.what_if import BAND, WhatIf, settings, what_if
from mpkit.timeline.idleness import CAUSES, bubble_words, idle_by_cause
from mpkit.timeline.replay.spans import HELD, SPAN
from mpkit.timeline.simulation import followed_by
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES, MEMORY, OP, Kind, RankTrace, Trace, lane_of
from mpkit.views.timeline.widget import TimelineView
from tests.recipes import adamw
from tests.serial import Clusters, Train

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


COLUMNS = [
    "rank", "lane", "kind", "stage", "microbatch", "name", "start", "end", "bytes", "flops", "step", "depth",
]  # fmt: skip


def test_the_data_frame_has_a_row_for_what_each_lane_did() -> None:
    t = mk.simulate(mk.Plan.gpipe(2, 2), hop=0.5)
    frame = t.to_dataframe()
    assert list(frame.columns) == COLUMNS
    assert set(frame["lane"]) == {"compute", "comm"}
    assert set(frame["kind"]) == {"forward", "backward", "send", "recv"}
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
    peak = timeline((0, F, start, start + length), ranks=1, held=held).peak_memory[0]
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
    assert any("s (measured on the kit's test machine)" in note for note in mk.Timeline.of(own, "cpu").notes)


def test_a_rank_that_waits_for_what_another_computes_depends_on_it() -> None:
    """It was called "message" where messages take no time."""
    causes = mk.simulate(mk.Plan.gpipe(4, 8)).because
    assert causes["idle: dependency"] == 4.5 and "idle: communication" not in causes


# ---- What if: the changes of a run, each alone on traces whose times are known, and all together on a real run.

HOW: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": adamw}
BATCH = torch.zeros(16, 8), torch.zeros(16, dtype=torch.long)
PLAN = mk.Plan.gpipe(2, 4)


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return mk.models.MLP(8, 4, width=32, layers=4)


def about(time: float) -> Any:
    """Return a time beside which messages of less than a millisecond do not count."""
    return pytest.approx(time, rel=1e-3)


def test_changes_add_up_in_their_order() -> None:
    found = settings(PLAN, {"link": 2, "microbatches": 8})
    assert [each.change for each in found] == ["", "link x2", "microbatches 8"]
    assert [each.plan.microbatches for each in found] == [4, 4, 8]
    assert [each.link for each in found] == [1, 2, 2]


def test_changes_that_only_work_together_count_as_one() -> None:
    found = settings(PLAN, {"virtual_stages": 2, "schedule": "interleaved_1f1b", "recompute": "full"})
    assert [each.change for each in found] == [
        "", "virtual_stages 2, schedule interleaved_1f1b", "recompute full",
    ]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), [
    ({}, r"changes nothing.*run\.what_if\(link=2"),
    ({"microbatchs": 8}, r"did you mean microbatches=8\?"),
    ({"chunks": 8}, r"microbatches= is what GPipe"),
    ({"banana": 8}, r"There are link, ranks, pp"),
    ({"link": 0}, r"link=0: .*link=0\.5"),
    ({"link": "fast"}, r"link='fast': .*link=2"),
    ({"schedule": "zb_h3"}, r"run\.what_if\(schedule='zb_h3'\) of Plan.*'zb_h1'"),
    ({"ranks": 3}, r"ranks=3: dp is what changes.*ranks=8.*pp=2, dp=2"),
])  # fmt: skip
def test_impossible_changes_are_refused(changes: dict[str, Any], message: str) -> None:
    plan = mk.Plan(pp=2, dp=2, microbatches=4)
    with pytest.raises(ValueError, match=message):
        settings(plan, changes)


@dataclass(eq=False)
class Recorded:
    """A run whose actions took what we say."""

    plan: mk.Plan
    trace: mk.Trace
    done: bool = True


@pytest.fixture(scope="module")
def run(train: Train) -> Run:
    return train(mlp(), [BATCH], PLAN, steps=4, **HOW)


@pytest.fixture(scope="module")
def ask(run: Run, clusters: Clusters) -> Callable[..., WhatIf]:
    """Ask about the run as if a forward took 1 s, a backward 2 s, and an update 4 s."""
    times = {Kind.FORWARD: 1e9, Kind.BACKWARD: 2e9, Kind.OPTIMIZER: 4e9}
    trace = scale_trace(run.trace, lambda rank, kind, ops: times[kind] / np.maximum(ops["cpu"], 1), times)
    recorded: Any = Recorded(PLAN, trace)
    return lambda **changes: what_if(recorded, run._job, clusters(2), changes)


@pytest.mark.slow
def test_a_schedule_rearranges_the_same_actions(ask: Callable[..., WhatIf]) -> None:
    found = ask(schedule="1f1b")
    assert found.step_time == about(5 * 3 + 4)
    assert found.timeline().busy == [about(4 * 3 + 4)] * 2


def test_a_backward_that_is_split_takes_longer(ask: Callable[..., WhatIf]) -> None:
    """By a fitted factor; the halves fill the bubble all the same."""
    found = ask(schedule="zb_h1")
    split = [kind for kind in found.timeline().spans["kind"] if kind == Kind.WEIGHT_GRAD]
    assert len(split) > 4
    work = [4 * (1 + 2 * SPLIT) + 4] * 2
    assert found.timeline().busy == pytest.approx(work, rel=0.1)
    assert found.bubble < found.rows[0].timeline.bubble


def test_causes_sum_to_the_change(ask: Callable[..., WhatIf]) -> None:
    found = ask(link=0.01, schedule="1f1b", microbatches=8)
    assert [change for change, _ in found.causes] == [
        "link x0.01", "schedule 1f1b", "microbatches 8",
    ]  # fmt: skip
    assert sum(seconds for _, seconds in found.causes) == pytest.approx(
        found.step_time - found.before.step_time
    )
    for row in found.rows:
        spent = sum(row.work.values()) + sum(row.idle.values())
        assert spent == pytest.approx(row.timeline.step_time)
    slow, fast = (max(row.timeline.exposed_comm) for row in (found.rows[1], found.rows[0]))
    assert slow == pytest.approx(100 * fast, rel=0.01)


def test_factors_of_a_played_plan_on_itself_change_nothing(clusters: Clusters) -> None:
    plan = mk.Plan.pipeline("zb_h1", 2, 4)
    trace = mk.trace_fake(mlp, plan, batch=BATCH, hardware="cpu", cluster=clusters(2), **HOW)
    same = Factors.from_traces(trace, 0, trace).apply_to(trace)
    for before, after in zip(trace.ranks, same.ranks, strict=True):
        assert (abs(before.ops["cpu"] - after.ops["cpu"]) <= 1).all()
    twice = Factors.from_traces(scale_trace(trace, lambda *_: 2.0, {Kind.INPUT_GRAD}), 0, trace).apply_to(
        trace
    )
    grads = twice.ranks[0].ops[twice.ranks[0].ops["kind"] == Kind.INPUT_GRAD]
    assert grads["cpu"].sum() == pytest.approx(
        2 * trace.ranks[0].ops["cpu"][trace.ranks[0].ops["kind"] == Kind.INPUT_GRAD].sum(), rel=1e-3
    )


@pytest.mark.slow
def test_a_real_run_is_predicted_and_shown(run: Run) -> None:
    found = run.what_if(link=2, schedule="1f1b", ranks=4)
    assert found.plan == mk.Plan.pipeline("1f1b", 4, 4)
    assert found.timeline().world_size == 4
    assert 0 < found.bubble < 1
    assert len(found.memory) == 4
    assert len(found.before.memory) == 2
    text = str(found)
    for words in ("the run", "link x2", "schedule 1f1b", "ranks 4", "Predicted:", "Peak memory"):
        assert words in text
    assert "what if" in found.to_svg()
    assert set(found.gap()) > {"idle: dependency", "forward of stage 0"}
    assert "text/plain" in found._repr_mimebundle_()


def test_a_change_that_no_run_has_shown_has_no_band(ask: Callable[..., WhatIf]) -> None:
    assert ask(schedule="1f1b", microbatches=2).error == BAND
    narrow = ask(precision="bf16")
    assert narrow.band is None and narrow.error is None
    assert "nobody has compared such a prediction with a run" in str(narrow)

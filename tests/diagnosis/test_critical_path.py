"""The critical path: what it adds up to, and what changes of single operations do to the step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpkit as mk
from mpkit.course.lab import _machine, _play_run, timeline
from mpkit.prediction.experiments.what_if import faster
from mpkit.trace import Kind, Lane
from tests.schedule.orders import valid_schedules

TIME = st.floats(0.0, 3.0)


def check(t: mk.Timeline) -> None:
    for number in t.steps:
        path, one = t.critical_path(number), t.step(number)
        graph = path.graph
        whole = pytest.approx(one.step_time, rel=1e-6)
        assert path.step_time == whole
        assert sum(op.seconds for op in path.ops) == whole
        assert sum(path.by_rank.values()) == whole and sum(path.by_kind.values()) == whole
        assert graph.ends == pytest.approx(graph.end - graph.begin, abs=1e-6 * max(one.step_time, 1e-9))
        ends = [0.0, *(op.end for op in path.ops)]
        assert [op.start for op in path.ops] == pytest.approx(ends[:-1], abs=1e-6 * one.step_time)


@settings(max_examples=40, deadline=None)
@given(valid_schedules, TIME, TIME, TIME, st.sampled_from([0.0, 0.3]))
def test_lengths_add_up_to_the_step_in_any_schedule(
    schedule: mk.Schedule, forward: float, i: float, w: float, hop: float
) -> None:
    check(mk.simulate(schedule, forward, i, w, hop, steps=2))


@settings(max_examples=40, deadline=None)
@given(valid_schedules, TIME, TIME, st.sampled_from([0.0, 0.3]), st.randoms(use_true_random=False))
def test_shorter_operations_and_slack(
    schedule: mk.Schedule, forward: float, back: float, hop: float, rng: Any
) -> None:
    path = mk.simulate(schedule, forward, back, back, hop).critical_path()
    graph = path.graph
    number = rng.randrange(len(graph.took))
    took, slack = graph.took.copy(), float(graph.slack[number])
    took[number] += slack
    assert graph.time_with(took) == pytest.approx(path.step_time)
    took[number] += 0.5
    assert graph.time_with(took) == pytest.approx(path.step_time + 0.5)
    shorter = rng.random() * float(graph.took[number])
    took = graph.took.copy()
    took[number] -= shorter
    assert path.step_time - shorter <= graph.time_with(took) + 1e-9 <= path.step_time + 2e-9


# ---- what the graph says, against replays of changed records ---------------------------------------------------


def longer(trace: mk.Trace, rank: int, op: int, seconds: float) -> mk.Trace:
    """Return a trace in which one op takes longer."""
    ops = trace.ranks[rank].ops.copy()
    ops["cpu"][op] += round(seconds * 1e9)
    ranks = list(trace.ranks)
    ranks[rank] = replace(ranks[rank], ops=ops)
    return replace(trace, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uneven", "offload"])
def test_slack_and_gain_are_those_of_replays(name: str) -> None:
    trace, machine = _play_run(name, None, None), _machine(name)
    t = mk.Timeline.of(trace, machine)
    path, step, rng = t.critical_path(), t.steps[-1], np.random.default_rng(0)
    spans, slack = path.timeline.spans, path.slack
    for rank in range(t.world_size):
        ops = trace.ranks[rank].ops
        mine = np.flatnonzero((ops["step"] == step) & (ops["kind"] < Kind.WAIT) & (ops["depth"] == 0))
        work = (spans["kind"] < Kind.WAIT) & (spans["depth"] == 0) & (spans["lane"] == Lane.COMPUTE)
        rows = np.flatnonzero((spans["rank"] == rank) & work)
        for at in rng.choice(len(mine), min(3, len(mine)), replace=False).tolist():
            op, row = int(mine[at]), int(rows[at])
            assert ops["kind"][op] == spans["kind"][row]
            more = float(slack[row])
            after = mk.Timeline.of(longer(trace, rank, op, more), machine).step(step)
            assert after.step_time <= path.step_time * (1 + 1e-6)
            whole = float(ops["cpu"][op]) * 1e-9
            free = mk.Timeline.of(longer(trace, rank, op, -whole), machine).step(step)
            assert path.step_time - free.step_time == pytest.approx(
                path.if_free(rows=np.array([row])), abs=1e-3 * path.step_time
            )


@pytest.mark.slow
def test_a_collective_is_free_on_all_of_its_ranks() -> None:
    path = timeline("slow link").critical_path()
    machine = faster(_machine("slow link"), 1e9)
    without = mk.Timeline.of(_play_run("slow link", None, None), machine)
    assert path.if_free(kind="all_reduce") == pytest.approx(path.step_time - without.step_time, rel=1e-4)
    last = [op for op in path.ops if op.kind == "all_reduce"][-1]
    assert path.if_free(rows=np.array([last.row])) == pytest.approx(last.seconds, rel=1e-6)


def test_what_is_asked_for_and_not_there() -> None:
    path = mk.simulate(mk.Plan.gpipe(2, 2)).critical_path()
    with pytest.raises(ValueError, match=r"no such operations\. It has the ranks 0 to 1 and"):
        path.if_free(kind="all_reduce")
    with pytest.raises(ValueError, match="has no step 3"):
        mk.simulate(mk.Plan.gpipe(2, 2)).critical_path(3)


def test_it_prints_and_is_drawn() -> None:
    path = mk.simulate(mk.Plan.gpipe(2, 2), forward=[1, 3]).critical_path()
    text = str(path)
    assert text.startswith("Critical path of step 0: 13.0 s through 6 operations on 2 of 2 ranks.")
    assert "-7.00 s  forward" in text and "-6.00 s  backward" in text
    drawn = path.to_svg()
    assert drawn.count('<rect class="path"') == len(path.ops)
    assert drawn.count('<line class="path"') == 2  # 0 to 1, and back
    assert path._repr_mimebundle_()["text/plain"] == text

"""Idle time by cause, and timelines beside each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mpkit as mk
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from mpkit.plan.schedule import NAMES
from mpkit.timeline.comparison import Comparison
from mpkit.timeline.idleness import CAUSES, idle_by_cause
from mpkit.trace import Kind, Lane, lane_of
from tests.timeline.test_timeline import timeline

IMBALANCE, COMMUNICATION = CAUSES.index("imbalance"), CAUSES.index("communication")
TIMES = st.sampled_from([0.5, 1.0, 1.37, 2.0])


def plan_of(name: str, p: int = 4, m: int = 8) -> mk.Plan:
    virtual = name in ("looped_bfs", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipev")
    return mk.Plan(pp=p, schedule=name, microbatches=m, virtual_stages=2 if virtual else 1)


@settings(max_examples=25)
@given(st.sampled_from(NAMES), st.integers(2, 4), st.data(), st.sampled_from([0.0, 0.1, 0.37]))
def test_imbalance_is_what_a_balanced_cut_would_save(
    name: str, p: int, data: st.DataObject, hop: float
) -> None:
    plan = plan_of(name, p, 2 * p)
    times = [data.draw(st.lists(TIMES, min_size=plan.stages, max_size=plan.stages)) for _ in range(3)]
    slow, even = mk.simulate(plan, *times, hop=hop), mk.simulate(plan, *map(np.mean, times), hop=hop)
    saved = np.array(slow.idle) - np.array(even.idle)  # less than nothing on a rank that the others wait for
    np.testing.assert_allclose(idle_by_cause(slow)[:, IMBALANCE], np.maximum(saved, 0), atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_communication_is_what_links_without_latency_would_save(name: str) -> None:
    plan = plan_of(name)
    forward = [1.0, 2.0] * (plan.stages // 2)
    slow, fast = (mk.simulate(plan, forward=forward, hop=hop) for hop in (3.0, 0.0))
    of_slow, of_fast = idle_by_cause(slow), idle_by_cause(fast)
    for rank in range(4):
        if of_slow[rank, IMBALANCE] == of_fast[rank, IMBALANCE] == 0:
            assert of_slow[rank, COMMUNICATION] == pytest.approx(slow.step_time - fast.step_time)
    rest = [causes.sum() - causes[:, [IMBALANCE, COMMUNICATION]].sum() for causes in (of_slow, of_fast)]
    assert rest[0] == pytest.approx(rest[1])


SPANS = [
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from([Kind.FORWARD, Kind.BACKWARD, Kind.WAIT, Kind.ALL_REDUCE, beside]),
            st.integers(0, 9), st.integers(1, 6),
        ),
        min_size=1, max_size=12,
    )
    for beside in (Kind.DATA, Kind.COPY_TO_HOST)
]  # fmt: skip


@pytest.mark.parametrize("clock", ["virtual", "measured"])
@given(spans=st.one_of(SPANS))
def test_whatever_overlaps_they_add_up(spans: list[tuple[int, Kind, int, int]], clock: str) -> None:
    rows, until = [], {0: 0, 1: 0}
    for rank, kind, pause, length in spans:
        start = pause
        if (
            lane_of(kind) == Lane.COMPUTE
        ):  # a rank computes one thing at a time; whatever else overlaps with it
            start, until[rank] = until[rank] + pause // 4, until[rank] + pause // 4 + length
        rows.append((rank, kind, float(start), float(start + length)))
    t = timeline(*rows, clock=clock)
    found = idle_by_cause(t)
    np.testing.assert_allclose(found.sum(axis=1), t.idle, atol=1e-9)
    assert (found >= -1e-9).all()


@pytest.fixture(scope="module")
def against_prediction(cluster: mk.Cluster) -> Comparison:
    torch.manual_seed(0)
    model, data = GPT(layers=4, width=32, length=16), text_batches(batch=8, length=16, steps=2)
    run = cluster.train(
        model,
        data,
        mk.Plan.gpipe(4, 4),
        loss=next_token_loss,
        optimizer=torch.optim.AdamW,
        steps=2,
        show=False,
    ).wait()
    return mk.compare(run)


def test_a_run_is_compared_with_its_prediction(against_prediction: Comparison) -> None:
    assert [row.name for row in against_prediction.rows] == ["predicted", "measured"]
    predicted, measured = (row.timeline for row in against_prediction.rows)
    assert (predicted.clock, measured.clock) == ("simulated", "virtual")
    gap = against_prediction.gap()
    assert sum(gap.values()) == pytest.approx(measured.step_time - predicted.step_time)
    # The means are the run's own, so forwards and backwards are no part of the gap; the optimizer is all of it.
    assert all(abs(gap[f"{kind} of stage {s}"]) < 1e-9 for kind in ("forward", "backward") for s in range(4))
    assert gap["optimizer"] > 0
    assert "measured is" in str(against_prediction)


@pytest.mark.parametrize(("a", "b"), [("gpipe", "zb_h1"), ("zb_h1", "zbv"), ("naive", "1f1b")])
def test_a_gap_is_explained_to_its_end(a: str, b: str) -> None:
    times = {"forward": 1.0, "input_grad": 1.1, "weight_grad": 0.9, "hop": 0.2}
    found = mk.compare(first=mk.simulate(plan_of(a), **times), second=mk.simulate(plan_of(b), **times))
    first, second = (row.timeline for row in found.rows)
    assert sum(found.gap().values()) == pytest.approx(second.step_time - first.step_time)
    assert sum(found.gap("second", "first").values()) == pytest.approx(first.step_time - second.step_time)

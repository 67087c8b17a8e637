"""What if: the changes of a run, each alone on traces whose times are known, and all together on a real run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import mpkit as mk
from mpkit.launch.session.run import Run
from mpkit.prediction.experiments.factors import SPLIT, Factors, scale_trace
from mpkit.prediction.what_if import BAND, settings, what_if, without_overlap
from mpkit.prediction.what_if_result import WhatIf
from mpkit.trace import Kind
from tests.recipes import adamw

HOW: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": adamw}
BATCH = torch.zeros(16, 8), torch.zeros(16, dtype=torch.long)
PLAN = mk.Plan.gpipe(2, 4)


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return mk.models.MLP(8, 4, width=32, layers=4)


def about(time: float) -> Any:
    """Return a time beside which messages of less than a millisecond do not count."""
    return pytest.approx(time, rel=1e-3)


# ---- changes -----------------------------------------------------------------------------------------------------


def test_changes_add_up_in_their_order() -> None:
    found = settings(PLAN, {"link": 2, "microbatches": 8, "overlap": False})
    assert [each.change for each in found] == ["", "link x2", "microbatches 8", "no overlap"]
    assert [each.plan.microbatches for each in found] == [4, 4, 8, 8]
    assert [each.link for each in found] == [1, 2, 2, 2]
    assert [each.overlap for each in found] == [True, True, True, False]


def test_changes_that_only_work_together_count_as_one() -> None:
    found = settings(PLAN, {"virtual_stages": 2, "schedule": "interleaved_1f1b", "recompute": "full"})
    assert [each.change for each in found] == [
        "",
        "virtual_stages 2, schedule interleaved_1f1b",
        "recompute full",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"changes nothing.*run\.what_if\(link=2"),
        ({"microbatchs": 8}, r"did you mean microbatches=8\?"),
        ({"chunks": 8}, r"microbatches= is what GPipe"),
        ({"banana": 8}, r"There are link, overlap, ranks, pp"),
        ({"link": 0}, r"link=0: .*link=0\.5"),
        ({"link": "fast"}, r"link='fast': .*link=2"),
        ({"overlap": "no"}, r"overlap=False"),
        ({"schedule": "zb_h3"}, r"run\.what_if\(schedule='zb_h3'\) of Plan.*'zb_h1'"),
        ({"ranks": 3}, r"ranks=3: dp is what changes.*ranks=8.*pp=2, dp=2"),
    ],
)
def test_impossible_changes_are_refused(changes: dict[str, Any], message: str) -> None:
    plan = mk.Plan(pp=2, dp=2, microbatches=4)
    with pytest.raises(ValueError, match=message):
        settings(plan, changes)


# ---- the machine -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replicas(clusters: Callable[[int], mk.Cluster]) -> mk.Trace:
    """Two steps of DDP with a bucket per layer, played."""
    return mk.trace_fake(
        mlp, mk.Plan.ddp(2, bucket_mb=0.001), batch=BATCH, steps=2, hardware="cpu", cluster=clusters(2), **HOW
    )


def _comm(timeline: mk.Timeline) -> list[float]:
    spans = timeline.spans[(timeline.spans["rank"] == 0) & (timeline.spans["kind"] == Kind.ALL_REDUCE)]
    spans = spans[spans["step"] == 1]
    return (spans["end"] - spans["start"]).tolist()  # type: ignore[no-any-return]


def test_without_overlap_communication_adds_to_compute(replicas: mk.Trace) -> None:
    slow = scale_trace(replicas, lambda rank, kind, ops: 1e4, {Kind.FORWARD, Kind.BACKWARD})
    hidden, alone = mk.Timeline.of(slow), mk.Timeline.of(without_overlap(slow))
    assert hidden.overlap > 0.5
    assert alone.overlap == pytest.approx(0, abs=1e-6)
    assert alone.busy == pytest.approx(hidden.busy)
    assert alone.step_time == pytest.approx(alone.busy[0] + sum(_comm(alone)), rel=1e-3)
    assert [rank["total"] for rank in alone.peak_memory] == [rank["total"] for rank in hidden.peak_memory]


# ---- the run's own times -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Recorded:
    """A run whose actions took what we say."""

    plan: mk.Plan
    trace: mk.Trace
    done: bool = True


@pytest.fixture(scope="module")
def run(train: Callable[..., Run]) -> Run:
    return train(mlp(), [BATCH], PLAN, steps=4, **HOW)


@pytest.fixture(scope="module")
def ask(run: Run, clusters: Callable[[int], mk.Cluster]) -> Callable[..., WhatIf]:
    """Ask about the run as if a forward took 1 s, a backward 2 s, and an update 4 s."""
    times = {Kind.FORWARD: 1e9, Kind.BACKWARD: 2e9, Kind.OPTIMIZER: 4e9}
    trace = scale_trace(run.trace, lambda rank, kind, ops: times[kind] / np.maximum(ops["cpu"], 1), times)
    recorded: Any = Recorded(PLAN, trace)
    return lambda **changes: what_if(recorded, run._job, clusters(2), changes)


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
    found = ask(link=0.01, schedule="1f1b", microbatches=8, overlap=False)
    assert [change for change, _ in found.causes] == [
        "link x0.01",
        "schedule 1f1b",
        "microbatches 8",
        "no overlap",
    ]
    assert sum(seconds for _, seconds in found.causes) == pytest.approx(
        found.step_time - found.before.step_time
    )
    for row in found.rows:
        assert row.compute + row.exposed_communication + row.idle == pytest.approx(row.step_time)
    assert found.rows[1].exposed_communication == pytest.approx(
        100 * found.rows[0].exposed_communication, rel=0.01
    )


def test_factors_of_a_played_plan_on_itself_change_nothing(clusters: Callable[[int], mk.Cluster]) -> None:
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


# ---- a real run --------------------------------------------------------------------------------------------------


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

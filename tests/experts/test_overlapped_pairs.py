"""F & B with divided experts: each computes while the other's tokens travel, and every number stays what it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.launch.session.run import Run
from mpkit.models import next_token_loss
from mpkit.plan.schedule import Schedule
from mpkit.strategies.comm.overlapped_pair import THREAD, OverlappedPair
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind, Lane, PartFlag
from mpkit.trace.record.silent_recorder import SilentRecorder
from tests.experts.test_expert_parallel import HOW, gpt, texts
from tests.serial import Train, check_equal

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

DUALPIPE = mk.Plan(pp=2, dp=2, schedule="dualpipev", microbatches=4, ep=2)
ONE_STAGE = mk.Plan(dp=2, schedule=Schedule(["F0 F1&B0 F2&B1 B2"]), microbatches=3, ep=2)
ONE_F_ONE_B = Schedule(["F0 F1 F2&B0 F3&B1 B2 B3", "F0 F1&B0 F2&B1 F3&B2 B3"])
PLANS = [
    replace(DUALPIPE, zero=1),
    mk.Plan(pp=2, dp=2, schedule=ONE_F_ONE_B, microbatches=4, ep=2),
    mk.Plan(pp=2, dp=2, schedule="overlapped_1f1b", virtual_stages=2, microbatches=4, ep=2),
    ONE_STAGE,
]


def apart(plan: mk.Plan) -> mk.Plan:
    """Return a plan with the same actions in the same order, one after the other."""
    schedule = plan.build()
    return replace(plan, schedule=Schedule(schedule.rows, "apart", schedule.stage_to_rank), virtual_stages=1)


def parts_of(timeline: Timeline) -> int:
    return int((timeline.spans["flags"] & PartFlag.CONTINUES != 0).sum())


def check_alike(joint: Run, other: Run) -> None:
    """Two runs have the same numbers to the bit, and only the first one overlapped actions."""
    assert parts_of(joint.timeline()) > 0
    assert parts_of(other.timeline()) == 0
    assert joint.losses == other.losses
    for name, value in joint.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_training_equals_serial_training_and_one_after_the_other(train: Train, plan: mk.Plan) -> None:
    model, data = gpt(layers=4), texts(7, 7)
    joint = check_equal(train, model, data, plan, **HOW)
    check_alike(joint, train(model, data, apart(plan), **HOW))


def test_dropout_and_recomputation_draw_what_they_draw_one_after_the_other(train: Train) -> None:
    model, data, plan = gpt(layers=4, dropout=0.1), texts(7), replace(DUALPIPE, zero=2, recompute="full")
    joint, other = (train(model, data, each, **{**HOW, "steps": 2}) for each in (plan, apart(plan)))
    check_alike(joint, other)
    assert str(joint.proof).startswith("equal to serial training")


@pytest.mark.parametrize(
    "plan",
    [
        replace(ONE_STAGE, zero=3, recompute="full"),
        pytest.param(replace(DUALPIPE, zero=3, prefetch=2), marks=pytest.mark.soak),
        pytest.param(replace(ONE_STAGE, dp=4, zero=3, dp_secondary=2), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_zero_3_gathers_for_both(train: Train, plan: mk.Plan) -> None:
    """Either action frees what it has passed, unless the other one still needs it."""
    model, data = gpt(layers=4, dropout=0.1), texts(7)
    joint, other = (train(model, data, each, **{**HOW, "steps": 3}) for each in (plan, apart(plan)))
    check_alike(joint, other)
    assert str(joint.proof).startswith("equal to serial training")


# ---- on a clock that counts -----------------------------------------------------------------------------------------


def waits_for_tokens(timeline: Timeline) -> float:
    """Return the seconds in which all ranks wait for all-to-alls of rows."""
    spans = timeline.spans
    waits = spans[(spans["kind"] == Kind.WAIT) & (spans["cause"] >= 0)]
    for_rows = is_of_rows(spans[waits["cause"]])
    return float((waits["end"] - waits["start"])[for_rows].sum())


def is_of_rows(spans: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (spans["kind"] == Kind.ALL_TO_ALL) & (spans["bytes"] > 1000)  # no counts
    return found


def test_tokens_travel_while_the_other_action_computes() -> None:
    """Each all-to-all of a pair is hidden as far as the other action computes; as many bytes are sent as without."""
    tokens = torch.empty(16, 64, dtype=torch.long, device="meta")
    machine = mk.hardware("8x-a100-nvlink")
    machine = replace(machine, link=replace(machine.link, bandwidth=machine.link.bandwidth / 20))
    played: list[Timeline] = []
    for each in (DUALPIPE, apart(DUALPIPE)):
        trace = mk.trace_fake(
            lambda: mk.models.GPT(layers=4, width=256, heads=8, vocab=512, length=64, experts=8, top_k=2), each,
            batch=(tokens, tokens), loss=next_token_loss, optimizer=torch.optim.AdamW, hardware=machine,
        )  # fmt: skip
        played.append(Timeline.of(trace, machine))
    joint, other = played
    assert waits_for_tokens(joint) < 0.8 * waits_for_tokens(other)  # also of actions that are in no pair
    assert joint.comm_bytes == other.comm_bytes
    spans = joint.spans
    for rank in range(4):
        mine = spans[spans["rank"] == rank]
        parts = mine[(mine["lane"] == Lane.COMPUTE) & (mine["flags"] != 0) & (mine["depth"] == 0)]
        sent = mine[is_of_rows(mine)]
        # While the tokens of a part that makes way are under way, the next part is one of the other action.
        for part, following in pairwise(parts):
            if part["flags"] & PartFlag.GOES_ON:
                last = sent[(sent["issued"] >= part["start"]) & (sent["issued"] <= part["end"])][-1]
                assert following["kind"] != part["kind"] and last["end"] > part["end"]
                assert following["start"] == pytest.approx(part["end"], abs=1e-8)


JOINT = [
    replace(DUALPIPE, microbatches=8),
    mk.Plan(pp=2, dp=2, ep=2, schedule="overlapped_1f1b", virtual_stages=2, microbatches=8),
    mk.Plan(dp=4, ep=4, schedule="overlapped_1f1b", microbatches=8),
]


@pytest.mark.parametrize("plan", JOINT, ids=repr)
def test_an_estimate_prices_pairs_as_they_run(plan: mk.Plan) -> None:
    model = {"layers": 8, "hidden": 1024, "heads": 8, "vocabulary": 1000, "experts": 8, "top_k": 2}
    joint, other = (
        mk.estimate(model, each, "8x-a100-nvlink", global_batch=32, sequence=512)
        for each in (plan, apart(plan))
    )
    for guess in (joint, other):
        assert sum(guess.because.values()) == pytest.approx(guess.step_time, rel=1e-9)
        assert guess.timeline().step_time == pytest.approx(guess.step_time, rel=1e-9)
    assert joint.because["experts"] < 0.7 * other.because["experts"]  # with what is in no pair


# ---- failures ---------------------------------------------------------------------------------------------------


class Fails(nn.Module):
    """A layer whose forward or gradient fails for the second micro-batch, in a pair."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls = way, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2 and self.way == "F":
            raise ArithmeticError("of the forward")
        if self.way == "B" and x.requires_grad:
            x.register_hook(self.fail)
        return x

    def fail(self, gradient: Tensor) -> Tensor:
        raise ArithmeticError("of the gradient")


@pytest.mark.parametrize(("way", "line"), [("F", "of the forward"), ("B", "of the gradient")])
def test_an_error_of_either_action_is_that_of_the_run(train: Train, way: str, line: str) -> None:
    torch.manual_seed(0)
    layer = mk.models.MixtureOfExperts(6, experts=4, top_k=2, hidden=5)
    model = nn.Sequential(nn.Linear(6, 6), Fails(way), layer, nn.Linear(6, 3)).double()
    data = [(torch.rand(6, 6).double(), torch.randint(3, (6,)))]
    how = {**HOW, "loss": nn.functional.cross_entropy, "steps": 1, "verify": False}
    with pytest.raises(mk.RankFailed, match=rf'raise ArithmeticError\("{line}"\)'):
        train(model, data, ONE_STAGE, **how)


def pair() -> OverlappedPair:
    return OverlappedPair(SilentRecorder(), torch.device("cpu"))


def turns(run: OverlappedPair, turn: Any, error: BaseException | None = None) -> Callable[[], None]:
    """Return an action that makes way three times, catches what a model may catch, and may end with an error."""

    def compute() -> None:
        for _ in range(3):
            try:
                run.make_way(turn)
            except Exception:  # as a model may do
                pytest.fail("the end of a pair is no business of a model")
        if error is not None:
            raise error

    return compute


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("turn", ["F", "B"])
def test_an_error_ends_both_and_leaves_no_thread(turn: str, error: BaseException) -> None:
    run = pair()
    errors = {turn: error}
    with pytest.raises(type(error)) as caught:
        run.run(turns(run, "F", errors.get("F")), turns(run, "B", errors.get("B")))
    assert caught.value is error
    assert all(thread.name != THREAD for thread in threading.enumerate())


def test_the_backward_runs_in_the_modes_of_the_caller() -> None:
    run, made = pair(), list[Tensor]()
    with torch.device("meta"), torch._subclasses.FakeTensorMode():
        run.run(lambda: run.make_way("F"), lambda: made.append(torch.empty(2)))
    assert made[0].is_meta and isinstance(made[0], torch._subclasses.FakeTensor)

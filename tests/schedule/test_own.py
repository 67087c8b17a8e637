"""A schedule of the learner's own, in whatever form it is written."""

import csv
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

import mpkit as mk
from mpkit import Plan
from mpkit.plan.schedule import NAMES, Action, Schedule, build_schedule
from mpkit.plan.schedule.catalogue import SCHEDULES, ScheduleEntry
from mpkit.prediction.advice.search import search
from mpkit.prediction.cost_model.stack import stack_of
from mpkit.prediction.cost_model.workload import workload_of
from mpkit.views.page.trial import trial

ONE_F_ONE_B = Schedule(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], name="own")


def by_ranks(p: int, m: int) -> Iterator[list[Action]]:
    for rank in range(p):
        ahead = min(p - 1 - rank, m)
        row = [Action("F", rank, i) for i in range(ahead)]
        for i in range(m):
            row += [Action("F", rank, i + ahead)] if i + ahead < m else []
            row += [Action("B", rank, i)]
        yield row


FORMS = {
    "text": "F0 F1 B0 B1\nF0 B0 F1 B1",
    "text with stages": "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
    "some with stages": "F0 0F1 B0 B1\n1F0 B0 F1 B1",
    "rows of text": ["F0 F1 B0 B1", "F0 B0 F1 B1"],
    "a drawing": "rank 0 | F0 F1  . B0 -- B1 --\nrank 1 |  . F0 B0 -- F1 B1 --",
    "with colons": "rank 0: F0 F1 B0 B1\n\n  rank 1: F0 B0 F1 B1\n",
    "rows of words": [["0F0", "0F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]],
    "rows of actions": [list(row) for row in ONE_F_ONE_B.rows],
    "a generator of rows": (row for row in ["F0 F1 B0 B1", "F0 B0 F1 B1"]),
    "a schedule": ONE_F_ONE_B,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_all_forms_make_the_same_schedule(form: object) -> None:
    schedule = Schedule(form)  # type: ignore[arg-type]
    assert schedule == ONE_F_ONE_B
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    plan = Plan(pp=2, microbatches=2, schedule=schedule)
    assert plan == Plan.from_schedule(schedule) == Plan.from_json(plan.to_json())
    assert plan.build() == schedule


def test_functions() -> None:
    assert Schedule(by_ranks, p=2, m=2) == Schedule(ONE_F_ONE_B.rows, name="by_ranks")
    plan = Plan(pp=3, microbatches=5, schedule=by_ranks)
    assert plan == Plan.from_schedule(by_ranks, pp=3, microbatches=5)
    assert plan.build().rows == build_schedule("1f1b", 3, 5).rows
    for back in (
        lambda p, m: "F0 F1 B0 B1\nF0 B0 F1 B1",
        lambda p, m: ONE_F_ONE_B,
        lambda p, m: ONE_F_ONE_B.rows,
    ):
        assert Schedule(back, "own", p=2, m=2) == ONE_F_ONE_B
    for name in NAMES:
        assert Schedule(lambda p, m, name=name: build_schedule(name, p, m, 2), p=3, m=4) == build_schedule(
            name, 3, 4, 2
        )
    with pytest.raises(ValueError, match=r"by_ranks is a function.*Schedule\(by_ranks, p=4, m=8\)"):
        Schedule(by_ranks)
    with pytest.raises(
        ValueError, match=r"by_ranks is a function.*Plan\(pp=4, microbatches=8, schedule=by_ranks\)"
    ):
        Plan.from_schedule(by_ranks)


def test_stages_of_ones_own_placement() -> None:
    rows = ["0F0 1F0 1B0 0B0", "2F0 2B0"]
    assert Schedule(rows).stage_to_rank == (0, 0, 1)
    assert Schedule(["0F0 0B0", "F0 B0"], stage_to_rank=(0, 1)).stages_of(1) == (1,)
    with pytest.raises(ValueError, match=r"stage_to_rank=\(0, 1\).*3 stages on 2 ranks"):
        Schedule(rows, stage_to_rank=(0, 1))


REFUSED = {
    "a number": (5, "5 is no schedule. Give its rows"),
    "numbers": ([5], "Rank 0's row is 5; it is text"),
    "an unknown kind": ("F0 G0", "'G0' is no action"),
    "an unknown kind of Action": ([[Action("G", 0, 0)]], "0G0 in rank 0's row is no action"),
    "a negative stage": ([[Action("F", -1, 0)]], "-1F0 in rank 0's row is no action.*counted from 0"),
    "a number among actions": ([["F0", 3]], "3 in rank 0's row is no action"),
    "no stage of several": (["0F0 3F0 F1"], "'F1': of which stage. Rank 0 holds stages 0 and 3: 0F1"),
    "two forwards together": (["F0&F1"], "'F0&F1': a forward runs together with one backward after it"),
    "three together": (["F0&B1&B2"], "runs together with one backward"),
}


@pytest.mark.parametrize(("given_", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_schedule_says_why(given_: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(given_)  # type: ignore[arg-type]


# ---- Pipeline schedules to and from torch's CSV, read and checked by torch's own code.

PLANS = st.tuples(
    st.sampled_from(sorted(NAMES)), st.sampled_from([2, 4]), st.sampled_from([4, 8, 12]),
    st.sampled_from([1, 2]),
)  # fmt: skip


def made(name: str, p: int, m: int, v: int) -> Schedule | None:
    """The schedule, or None where there is none of these sizes."""
    try:
        return build_schedule(name, p, m, v)
    except ValueError:
        return None


def torch_rows(text: str) -> dict[int, list[Any]]:
    """What torch reads from a file with this text."""
    lines = list(csv.reader(text.splitlines()))
    return {
        rank: [torch_schedules._Action.from_str(field) for field in row] for rank, row in enumerate(lines)
    }


@given(PLANS)
def test_torch_reads_the_same_actions_and_accepts_them(plan: tuple[str, int, int, int]) -> None:
    schedule = made(*plan)
    if schedule is None or schedule.name == "naive":
        return
    rows = torch_rows(schedule.to_csv())
    flat = {
        rank: [str(one) for action in row for one in (action.sub_actions or [action])]
        for rank, row in rows.items()
    }
    assert flat == {rank: [str(action) for action in row] for rank, row in enumerate(schedule.rows)}
    if not schedule.together:
        torch_schedules._validate_schedule(rows, len(schedule.rows), schedule.stages, schedule.microbatches)


# ---- A schedule is one entry of the catalogue: with it, it runs, and is drawn, predicted, exported, read and advised.


def two_waves(p: int, m: int, v: int) -> Schedule:
    """Build GPipe twice, with half of the micro-batches each."""
    halves = [range(m // 2), range(m // 2, m)]
    row = [(kind, i) for half in halves for kind, order in (("F", half), ("B", half[::-1])) for i in order]
    return Schedule([[Action(kind, stage, i) for kind, i in row] for stage in range(p)], name="two_waves")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> mk.Plan:
    """A plan of the new schedule, which is in the catalogue while the test runs."""
    entry = ScheduleEntry(
        two_waves, "two waves", "GPipe twice.", idle=6, advised=(1,), torchs="TwoWaves",
    )  # fmt: skip
    monkeypatch.setitem(SCHEDULES, "two_waves", entry)
    return mk.Plan.pipeline("two_waves", 2, 4)


@pytest.mark.slow
def test_it_runs(registered: mk.Plan, cluster: mk.Cluster) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    data = [(torch.randn(8, 4).double(), torch.randn(8, 2).double())]
    run = cluster.resized(2).train(
        model, data, registered, loss=nn.functional.mse_loss, steps=2, verify="all",
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    ).wait()  # fmt: skip
    assert str(run.proof).startswith("equal to serial training in steps 1 and 2")
    assert run.timeline().spans["microbatch"].max() == 3


def test_it_is_drawn(registered: mk.Plan) -> None:
    assert (
        str(registered.build()).splitlines()[0]
        == "rank 0 | F0 F1  .  .  . B1 -- B0 -- F2 F3  .  .  . B3 -- B2 --"
    )
    assert "two waves" in trial(2, 4) and "two_waves on 2 ranks" in registered.describe()
    assert mk.explore("two_waves", ranks=2, microbatches=4) is not None


def test_it_is_predicted(registered: mk.Plan) -> None:
    assert float(registered.bubble_in_theory or 0) == pytest.approx(mk.simulate(registered).bubble) == 1 / 3
    found = mk.estimate("llama3-8b", registered, "8x-h100-nvlink", global_batch=8, sequence=1024)
    assert found.timeline().step_time == pytest.approx(found.step_time)


def test_it_is_exported_and_read(registered: mk.Plan) -> None:
    text = str(registered.to("torchtitan"))
    assert "TwoWaves" in text
    assert mk.Plan.read(text).schedule == "two_waves"


@pytest.mark.usefixtures("registered")
def test_it_is_advised() -> None:
    asked = workload_of("llama3-8b", "8x-h100-nvlink", stack_of("pytorch"), None, 16, 1024)
    found, _, _ = search(asked, [8])
    assert {each.layout.schedule for each in found if each.layout.pp > 1} > {"two_waves", "1f1b"}

"""A schedule is one entry of the catalogue: with it, it runs, and is drawn, predicted, exported, read and advised."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit.plan.schedule import Action, Schedule
from mpkit.plan.schedule.catalogue import SCHEDULES, ScheduleEntry
from mpkit.prediction.advice.search import LayoutPrices, search
from mpkit.prediction.advice.space import TrainingQuestion
from mpkit.prediction.cost_model.known_models import architecture_of
from mpkit.prediction.cost_model.preset import preset_for
from mpkit.prediction.cost_model.stack import stack_of
from mpkit.views.page.trial import trial

MPKIT = Path(mk.__file__).parent


def two_waves(p: int, m: int, v: int) -> Schedule:
    """Build GPipe twice, with half of the micro-batches each."""
    halves = [range(m // 2), range(m // 2, m)]
    row = [(kind, i) for half in halves for kind, order in (("F", half), ("B", half[::-1])) for i in order]
    return Schedule([[Action(kind, stage, i) for kind, i in row] for stage in range(p)], name="two_waves")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> mk.Plan:
    """A plan of the new schedule, which is in the catalogue while the test runs."""
    entry = ScheduleEntry(
        two_waves, "two waves", "GPipe twice.", idle=lambda p, m: 6 * (p - 1), advised=(1,),
        elsewhere={"torchtitan": "TwoWaves"},
    )  # fmt: skip
    monkeypatch.setitem(SCHEDULES, "two_waves", entry)
    return mk.Plan.pipeline("two_waves", 2, 4)


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
    asked = TrainingQuestion(architecture_of("llama3-8b"), 16, 1024)
    machine, stack = mk.hardware("8x-h100-nvlink"), stack_of("pytorch")
    priced = LayoutPrices(asked, machine, stack, preset_for(machine.device.name, stack.name))
    found, _, _ = search(priced, 8)
    assert {each.layout.schedule for each in found if each.layout.pp > 1} > {"two_waves", "1f1b"}


def test_no_other_module_spells_the_name_of_a_schedule() -> None:
    spelled = [
        f"{path.relative_to(MPKIT)}:{node.lineno}: {node.value}"
        for path in MPKIT.rglob("*.py")
        if path.parent != MPKIT / "plan" / "schedule" and not {"course", "reference"} & set(path.parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in SCHEDULES
    ]
    assert not spelled, "\n".join(spelled)

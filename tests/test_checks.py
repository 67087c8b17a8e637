"""The table of checks: each example is rejected by its own check, and docs/checks.md prints the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.prepare import checks
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.prepare.checks import CHECKS, Check
from mpkit.strategies.prepare.prepare import prepare
from scripts.checks_page import PAGE, message_of, render
from scripts.count_stops import walk_of_plan


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the modules that torch.compile imports
def test_each_example_is_rejected_by_its_own_check(monkeypatch: pytest.MonkeyPatch) -> None:
    rejections: dict[str, Rejection] = {}

    def watched(check: Check) -> Check:
        def find(resolved: ResolvedPlan, task: Task) -> Rejection | None:
            try:
                rejection = check.find(resolved, task)
            except Rejection as raised:
                rejection = raised
            if rejection is not None:
                rejections[check.name] = rejection
            return rejection

        return check._replace(find=find)

    monkeypatch.setattr(checks, "CHECKS", tuple(map(watched, CHECKS)))
    messages = {}
    for check in CHECKS:
        rejections.clear()
        messages[check.name] = message_of(check)
        assert {name: str(said) for name, said in rejections.items()} == {check.name: messages[check.name]}
    assert PAGE.read_text(encoding="utf-8") == render(messages), "python -m scripts.checks_page"


def test_a_row_says_what_it_rejects() -> None:
    assert len({check.name for check in CHECKS}) == len({check.find for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert (check.find.__doc__ or "").startswith("Reject "), check.name


def test_a_plan_makes_at_most_15_stops_from_train_to_the_last_check() -> None:
    stops = walk_of_plan(mk.Plan.pipeline("1f1b", 2, 2))
    assert stops[0] == ("launch/session/cluster.py", "train")
    assert len(stops) <= 15, stops
    after = stops[stops.index(("strategies/prepare/checks.py", "find_rejection")) + 1 :]
    assert {module.split("/")[2] for module, _ in after} <= {"optimizer"}


class Residual(nn.Module):
    """It is no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.layer(x))


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Residual()])
def test_a_single_sample_does_not_stop_the_dry_run_before_the_check(model: nn.Module) -> None:
    batch = torch.randn(8, 4), torch.randn(8, 4)
    how: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD,
        "steps": 1,
        "ranks": 2,
    }
    with pytest.raises(
        ValueError, match="is a BatchNorm1d, and would take its statistics over each of 8 micro"
    ):
        prepare(model, [batch], mk.Plan.gpipe(2, 8), **how)

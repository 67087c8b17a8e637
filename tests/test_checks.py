"""The table of checks: each example is rejected by its own check, and docs/checks.md prints the table."""

from __future__ import annotations

import pytest

from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.prepare import checks
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.prepare.checks import CHECKS, Check
from scripts.checks_page import PAGE, message_of, render


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

"""docs/checks.md: each example is rejected by its own check, or stopped in step 1, with the words that the page has."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import fill
from typing import Any

import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit.strategies.prepare import checks
from mpkit.strategies.prepare.checks import CHECKS
from mpkit.strategies.prepare.prepare import prepare

PAGE = (Path(__file__).parents[1] / "docs" / "checks.md").read_text(encoding="utf-8")
BEFORE, STOPPED = PAGE.split("# What the proof stops in step 1")
SET_UP = BEFORE.split("```python\n")[1].split("```")[0]
SECTION = re.compile(
    r"^## (?:\d+\. )?(.+?)$.*?```python\n(.*?)```\n\n```text\n(.*?)\n```", re.MULTILINE | re.DOTALL
)
EXAMPLES = SECTION.findall(BEFORE[BEFORE.index("## 1.") :])


def run_example(code: str, train: Any) -> None:
    names: dict[str, Any] = {}
    exec(SET_UP, names)

    def call(model: nn.Module, plan: mk.Plan, data: Any = (names["x"], names["y"]), **options: Any) -> None:
        options = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD, "steps": 1} | options
        train(model, [data], plan, **options)

    names["train"] = call
    exec(code, names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the modules that torch.compile imports
def test_each_example_is_rejected_by_its_own_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert [name for name, *_ in EXAMPLES][: len(CHECKS)] == [
        f"{c.name[0].upper()}{c.name[1:]}" for c in CHECKS
    ]
    for number, (name, code, words) in enumerate(EXAMPLES):
        own = CHECKS[number : number + 1] or CHECKS  # the optimizer's are no row of the table
        monkeypatch.setattr(checks, "CHECKS", own)
        with pytest.raises(ValueError) as caught:
            run_example(code, lambda *given, **how: prepare(*given, ranks=given[2].ranks, **how))
        assert fill(str(caught.value), 118, break_long_words=False, break_on_hyphens=False) == words, name


@pytest.mark.parametrize(("name", "code", "words"), SECTION.findall(STOPPED))
def test_each_example_is_stopped_in_its_first_step(name: str, code: str, words: str, train: Any) -> None:
    with pytest.raises(mk.errors.MpkitError) as caught:
        run_example(code, train)
    assert " ".join(words.split()) in " ".join(str(caught.value).split()), name


def test_a_row_says_what_it_rejects_and_why() -> None:
    assert len({check.name for check in CHECKS}) == len({check.find for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert (check.find.__doc__ or "").startswith("Reject "), check.name
        assert check.why in ("blind", "obscure", "common")

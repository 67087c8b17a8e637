"""docs/checks.md, made from the table of checks (mpkit.strategies.prepare.checks): python -m scripts.checks_page.

Each example runs, and its message is printed below it. No rank starts.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import nn

import mpkit as mk
from mpkit.strategies.prepare.checks import CHECKS, SET_UP, Check
from mpkit.strategies.prepare.prepare import prepare

__all__ = ["PAGE", "message_of", "render"]

PAGE = Path(__file__).parents[1] / "docs" / "checks.md"

INTRODUCTION = """\
# What is rejected before a rank starts

<!-- python -m scripts.checks_page writes this page. -->

A training is equal to serial training, or `cluster.train` raises a `ValueError` before a rank starts, or the run's own
[proof](proof.md) stops it. Checks find the second kind. They run in this order, each on the plan as it was resolved for
the model, and the first one that objects ends it. `mk.trace_fake`, which runs without processes, makes the same checks.

Arguments of wrong types and values are rejected before, and so is whatever the plan cannot be resolved for: a model
that refuses its data, more stages than layers, heads that the ranks cannot divide. The checkpoint of `resume_from` is
compared last, before a rank starts too: it must be complete, of the same model and kind of optimizer, and not beyond
the last step ([checkpoints](checkpoints.md)).

The examples below run after this:
"""


def message_of(check: Check) -> str:
    """Return what the user is told about a check's example.

    Raises:
        AssertionError: the example is not rejected.
    """
    names: dict[str, Any] = {}
    exec(SET_UP, names)

    def train(model: nn.Module, plan: mk.Plan, data: Any = (names["x"], names["y"]), **options: Any) -> None:
        options = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD, "steps": 1} | options
        prepare(model, [data], plan, ranks=plan.ranks, **options)

    names["train"] = train  # which starts no cluster
    try:
        exec(check.example, names)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"the example of {check.name!r} is not rejected")


def render(messages: dict[str, str]) -> str:
    """Return the page.

    Args:
        messages: what each example is told, by the check's name.
    """
    parts = [INTRODUCTION, f"```python\n{SET_UP.strip()}\n```\n"]
    for number, check in enumerate(CHECKS, 1):
        sentence = (inspect.getdoc(check.find) or "").split("\n\n")[0].replace("\n", " ")
        rejects = sentence.replace("Reject ", "Rejects ", 1)
        message = fill(messages[check.name], 118, break_long_words=False, break_on_hyphens=False)
        parts.append(
            f"## {number}. {check.name[0].upper()}{check.name[1:]}\n\n{rejects}\n\n"
            f"```python\n{check.example.strip()}\n```\n\n```text\n{message}\n```\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render({check.name: message_of(check) for check in CHECKS}), encoding="utf-8")

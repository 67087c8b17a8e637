"""Faults that begin in a random step: the proof never says "equal" of a step that is wrong.

Each random training of `test_no_false_alarm`, under its six plans and with a fault that begins in a random step, ends
in one of these columns:

    stopped         the run is stopped
    not verified    it says that no step was compared
    not compared    it says "equal" of earlier steps only, and nothing of those with the fault
    harmless        the fault changes nothing: weight decay is lost where there is none
    silent          it says "equal" of a step with the fault, and differs from the run without it. There must be none

`pytest -m soak tests/proof/test_late_faults.py -k 'from_40 or from_50' -s` prints the columns of these trainings.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpkit as mk
from tests.proof.planted import FAULTS
from tests.proof.test_no_false_alarm import PLANS, training

pytestmark = pytest.mark.filterwarnings("ignore")

EACH, STEPS = 10, 5
AT_THE_START = {"mode", "others' samples", "decay", "initial", "no update", "an overflow"}
"""Faults that are planted where a run begins, or act in one step only; and one that fp16 expects."""
LATE = sorted(set(FAULTS) - AT_THE_START)


def plant_after(step: int, fault: str) -> Callable[[Any, int], None]:
    """Return an `on_step` that plants the fault on its rank after a step, counted from 0."""

    def on_step(_: Any, number: int) -> None:
        if number == step:
            FAULTS[fault](dist.get_rank() if dist.is_initialized() else 0)

    return on_step


def nothing(*_: Any) -> None:
    """Do as little after each step: the run without the fault."""


def differ(run: mk.Run, other: mk.Run) -> bool:
    """Return whether losses or weights of two runs differ by more than roundings."""
    if any(
        not abs(mine - theirs) <= 1e-5 * (1 + abs(theirs))
        for mine, theirs in zip(run.losses, other.losses, strict=True)
    ):
        return True
    weights = other.state_dict()
    return any(
        value.is_floating_point()
        and not torch.allclose(
            value, weights[name], rtol=1e-4, atol=1e-5 * (1 + float(weights[name].abs().max()))
        )
        for name, value in run.state_dict().items()
    )


def compares_the_fault(steps: tuple[int, ...], after: int, fault: str) -> bool:
    """Return whether a compared step, counted from 1, has the fault that is planted after a step counted from 0.

    States that are lost between two steps are seen where both are compared: the later one begins with those that the
    repetition has then.
    """
    if fault == "states":
        return any(step > after + 2 and step - 1 in steps for step in steps)
    return max(steps) > after + 1


def end_of(
    cluster: mk.Cluster, model: nn.Module, plan: mk.Plan, how: dict[str, Any], after: int, fault: str
) -> str:
    """Train with the fault from the step after this one on; return the column."""

    def train(on_step: Callable[[Any, int], None], **other: Any) -> mk.Run:
        return cluster.train(copy.deepcopy(model), plan=plan, on_step=on_step, **how | other).wait()

    try:
        run = train(plant_after(after, fault))
    except (mk.errors.NotSerial, mk.RankFailed):
        return "stopped"
    if run.proof.status == "not verified":
        return "not verified"
    if not differ(run, train(nothing)):
        return "harmless"
    if not compares_the_fault(run.proof.steps, after, fault):
        return "not compared"
    try:
        train(plant_after(after, fault), verify="all")
    except mk.errors.NotSerial as first:  # where it acts first: no gradient may have been clipped before
        return "silent" if first.step in run.proof.steps else "not compared"
    return "silent"


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, 300, EACH), ids="from_{}".format)
def test_no_step_with_a_fault_is_equal(clusters: Callable[[int], mk.Cluster], first: int) -> None:
    columns: Counter[str] = Counter()
    silent = []
    for seed in range(first, first + EACH):
        for name, plan in PLANS.items():
            draw = random.Random(f"{seed} {name}")
            how = training(seed)
            model = how.pop("model").double()
            how["data"] = [(x.double(), y) for x, y in how["data"]]
            how["steps"], how["verify"] = STEPS, draw.choice(["all", "first"])
            made, fault, after = plan(), draw.choice(LATE), draw.randrange(how["steps"] - 1)
            column = end_of(clusters(made.ranks), model, made, how, after, fault)
            columns[column] += 1
            if column == "silent":
                silent.append(
                    f"training {seed} under {name}, {fault!r} from step {after + 2} on, verify={how['verify']}"
                )
    print(f"\ntrainings {first} to {first + EACH - 1}: {dict(columns)}")
    assert not silent, "\n".join(silent)

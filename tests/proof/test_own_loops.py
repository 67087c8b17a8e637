"""mk.prove: loops of one's own around torch's wrappers and mpkit's are found equal, or a mistake is named."""

import copy
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit.strategies.program_calls.communication import ComparedFunction
from tests.serial import Clusters

sys.path.insert(0, str(Path(__file__).parent))
from own_loops import MISTAKES, MISTAKES_ON_FOUR, ON_FOUR, ON_TWO

pytestmark = pytest.mark.slow

IMPORTED = (
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "mpkit.strategies.wrappers.prove", "mpkit.strategies.prepare.prepare",
)  # fmt: skip
"""Imported once, before ranks are forked: in each of them it takes longer than its loops."""


def said(ctx: Any, loops: Sequence[Callable[[Any], Any]]) -> dict[str, str]:
    """The line of each loop's proof, or what stopped it."""
    found = {}
    for loop in loops:
        try:
            found[loop.__name__] = str(loop(ctx))
        except mk.errors.NotSerial as error:
            found[loop.__name__] = str(error)
    return found


@pytest.mark.parametrize(
    ("ranks", "right", "wrong"), [(2, ON_TWO, MISTAKES), (4, ON_FOUR, MISTAKES_ON_FOUR)], ids=["2", "4"]
)
def test_what_is_right_is_equal_and_mistakes_are_named_on_all_ranks(
    clusters: Clusters, ranks: int, right: Sequence[Any], wrong: dict[Any, str]
) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    launch = clusters(ranks).launch(ComparedFunction(said), ([*right, *wrong],), modules=IMPORTED)
    launch.finish()
    equal = ": equal to plain PyTorch in steps 1 and 2: gradients within "
    texts = {loop.__name__: equal for loop in right} | {loop.__name__: text for loop, text in wrong.items()}
    for found in launch.results():
        assert {name: found[name] for name, text in texts.items() if text not in found[name]} == {}


def without_an_optimizer(ctx: Any) -> list[str]:
    torch.manual_seed(0)
    told = []
    for says_so in (True, False):
        model = nn.Linear(2, 2)
        proof = mk.prove(model, copy.deepcopy(model), 2)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if says_so:
                proof.compare()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        told.append(proof.line)
    return told


def test_a_loop_without_an_optimizer_compares_by_itself(clusters: Clusters) -> None:
    for told, silent in clusters(2).run(without_an_optimizer):
        assert "equal to plain PyTorch in steps 1 and 2" in told
        assert "not verified: something else than step() of" in silent


@pytest.mark.parametrize(("module", "plain", "text"), [
    (nn.Linear(1, 1), None, "plain = copy.deepcopy"),
    (nn.Linear(1, 1), nn.Linear(1, 1, bias=False), "bias is a parameter of one of them only"),
])  # fmt: skip
def test_what_is_not_the_plain_module_is_told(module: nn.Module, plain: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        mk.prove(module, plain)

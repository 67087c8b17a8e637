"""mk.prove: loops of one's own around torch's wrappers and mpkit's are found equal, or a mistake is named."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpkit as mk
from tests.serial import Clusters

sys.path.insert(0, str(Path(__file__).parent))
from own_loops import MISTAKES, ON_FOUR, ON_TWO, some_ranks


def lines(ctx: Any, loops: Sequence[Callable[[Any], str]]) -> dict[str, str]:
    return {loop.__name__: loop(ctx) for loop in loops}


@pytest.mark.parametrize(("ranks", "loops"), [(2, ON_TWO), (4, ON_FOUR)], ids=["2 ranks", "4 ranks"])
def test_what_is_right_is_found_equal(clusters: Clusters, ranks: int, loops: Sequence[Any]) -> None:
    for found in clusters(ranks).run(lines, loops):
        for name, line in found.items():
            assert ": equal to plain PyTorch in steps 1 and 2: gradients within " in line, (name, line)


def mistakes(ctx: Any, loops: Sequence[Callable[[Any], None]]) -> dict[str, str]:
    found = {}
    for loop in loops:
        try:
            loop(ctx)
            found[loop.__name__] = "nothing was found"
        except mk.errors.NotSerial as error:
            found[loop.__name__] = str(error)
    return found


def test_mistakes_are_named_on_all_ranks(clusters: Clusters) -> None:
    one, other = clusters(2).run(mistakes, list(MISTAKES))
    assert one == other
    names = {loop.__name__: text for loop, text in MISTAKES.items()}
    assert {name: one[name] for name, text in names.items() if text not in one[name]} == {}


def test_a_mean_over_some_ranks_is_named(clusters: Clusters) -> None:
    for found in clusters(4).run(mistakes, [some_ranks]):
        assert "the mean over ranks [0, 1] alone, without [2, 3]" in found["some_ranks"]


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


@pytest.mark.parametrize(
    ("module", "plain", "text"),
    [
        (nn.Linear(1, 1), None, "plain = copy.deepcopy"),
        (nn.Linear(1, 1), nn.Linear(1, 1, bias=False), "bias is a parameter of one of them only"),
    ],
)
def test_what_is_not_the_plain_module_is_told(module: nn.Module, plain: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        mk.prove(module, plain)

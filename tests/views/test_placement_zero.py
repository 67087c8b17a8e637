"""A placement under ZeRO shows what is sharded, and by whom which elements are held."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit.strategies.placement.zero_shares import shares_of


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(La=nn.Linear(3, 3), Lb=nn.Linear(3, 3), Lc=nn.Linear(3, 2)))


def test_zero_3_is_another_picture_than_ddp() -> None:
    sharded, whole = mk.Plan.zero(3, 3).placement(layers()), mk.Plan.ddp(3).placement(layers())
    assert "rank 0   dp0   1/3 of La, Lb, Lc" in str(sharded)
    assert "rank 0   dp0   La, Lb, Lc" in str(whole)
    assert "what ZeRO" not in str(whole) + whole.to_svg()
    for words in ("La.weight [3, 3]", "0-3", "4-7", "parameters, 1/3 each", "optimizer states, 1/3 each"):
        assert words in sharded.to_svg()
    assert "La.bias [3]       none    none    0-2" in str(sharded)


@pytest.mark.parametrize(("zero", "words"), [
    (1, "parameters and gradients whole, 1/4 of optimizer states"),
    (2, "parameters whole, 1/4 of gradients, optimizer states"),
    (3, "1/4 of parameters, gradients, optimizer states"),
])  # fmt: skip
def test_each_stage_says_what_is_whole(zero: int, words: str) -> None:
    assert words in str(mk.Plan.zero(zero, 4).placement())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_every_element_is_somebodys(zero: int) -> None:
    for share in shares_of(mk.Plan.zero(zero, 3), layers()):
        elements = [i for start, end in share.parts for i in range(start, end)]
        assert elements == list(range(torch.Size(share.shape).numel()))

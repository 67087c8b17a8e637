"""Recomputation block by block: what is held, and that nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.trace import Kind
from tests.mesh.test_mesh_training import tokens
from tests.recipes import adamw
from tests.serial import Train, check_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*_token_id.*"),
    pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan"),
]

S, H = 16, 16
"""Bytes between two blocks: of 4 sequences, in fp64."""


def gpt(layers: int = 4, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab=32, layers=layers, width=H, heads=2, length=S, dropout=dropout).double()


# ---- what is held ------------------------------------------------------------------------------------------------


def test_the_recomputation_is_seen(train: Train, clusters: Callable[[int], mk.Cluster]) -> None:
    """A RECOMPUTE within the backward for each block, with its FLOPs, which the backward's count too."""
    how: dict[str, Any] = {"loss": next_token_loss, "optimizer": adamw}
    data, plan = tokens(4, S, 32), mk.Plan(recompute="full", microbatches=2)
    real = train(gpt(), data, plan, steps=1, **how).trace.ranks[0]
    fake = mk.trace_fake(gpt, plan, batch=data[0], cluster=clusters(1), **how).ranks[0]
    for rank in (real, fake):
        again = rank.ops[rank.ops["kind"] == Kind.RECOMPUTE]
        assert [rank.name(op["name"]) for op in again] == [f"block{i}" for i in (3, 2, 1, 0)] * 2
        assert set(again["depth"]) == {1}
    for kind in (Kind.RECOMPUTE, Kind.BACKWARD):
        flops = [rank.ops["flops"][rank.ops["kind"] == kind].tolist() for rank in (real, fake)]
        assert flops[0] == flops[1]


# ---- refused -----------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws random numbers that nobody can repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * random.SystemRandom().random()


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.linear(x)


@pytest.mark.parametrize(("block", "words"), [(Noisy, "something else"), (Writing, "writes into its input")])
def test_blocks_that_cannot_be_computed_again_are_refused(
    train: Train, block: type[nn.Module], words: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), block(), block())
    data = [(torch.randn(2, 4), torch.randn(2, 4))]
    with pytest.raises(mk.RankFailed, match=words):
        train(model, data, mk.Plan(recompute="full"), loss=F.mse_loss, optimizer=adamw, steps=1)


def test_selective_of_a_model_without_attention_is_warned_of(train: Train) -> None:
    data = [(torch.randn(4, 6).double(), torch.randn(4, 3).double())]
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with pytest.warns(
        mk.errors.UnwisePlan, match=r"Sequential makes none: nothing is recomputed.*recompute='full'"
    ):
        check_equal(
            train, net, data, mk.Plan(recompute="selective"), loss=F.mse_loss, optimizer=adamw, steps=1
        )


def test_what_recomputes_nothing_is_warned_of_and_what_says_nothing_is_refused(train: Train) -> None:
    data = [(torch.randn(2, 4), torch.randn(2, 4))]
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": adamw, "steps": 1}
    with pytest.warns(mk.errors.UnwisePlan, match=r"has none .*recompute='full'"):
        train(nn.Sequential(nn.Linear(4, 4)), data, mk.Plan(recompute="every=2"), **how)
    with pytest.warns(mk.errors.UnwisePlan, match=r"has 2: .*recompute='every=2'"):
        train(
            nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))),
            data,
            mk.Plan(recompute="every=3"),
            **how,
        )
    for given in ("every=0", "every=two", "every", 2):
        with pytest.raises(ValueError, match=r"Did you mean Plan\(recompute='every=2'\)"):
            mk.Plan(recompute=given)  # type: ignore[arg-type]
    assert mk.Plan.from_json(mk.Plan(pp=2, recompute="every=2").to_json()).recompute == "every=2"

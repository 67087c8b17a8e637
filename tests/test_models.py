"""Models are chains; chains are cut where it is best."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpkit.data import images, spirals, text_batches
from mpkit.models import GPT, MLP, ConvNet, GPTConfig, balance, chain, next_token_loss


def every_cut(layers: int, stages: int) -> list[list[range]]:
    found = []
    for points in combinations(range(1, layers), stages - 1):
        found.append([range(a, b) for a, b in pairwise([0, *points, layers])])
    return found


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_balance_is_the_best_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def dearness(parts: list[range]) -> tuple[int, int]:
        each = [sum(costs[i] for i in part) for part in parts]
        return max(each), sum(cost**2 for cost in each)

    found = balance(costs, stages)
    assert found in every_cut(len(costs), stages)
    assert dearness(found) == min(map(dearness, every_cut(len(costs), stages)))


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


class Backwards(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def test_a_chain_is_a_sequential_that_goes_through_its_layers() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(relu, nn.Sequential(Forked(), relu), Backwards(nn.ReLU()), relu)
    assert [name for name, _ in chain(model)] == ["0", "1.0", "1.1", "2", "3"]
    with pytest.raises(ValueError, match=r"nn.Sequential\(model.left, model.right\)"):
        chain(Forked())
    with pytest.raises(ValueError, match="a forward, a __call__ or hooks of its own"):
        chain(Backwards(nn.ReLU()))
    with pytest.raises(ValueError, match="without layers"):
        chain(nn.Sequential(nn.Sequential()))


def test_the_kits_models_are_chains_and_learn() -> None:
    torch.manual_seed(0)
    cases = [
        (GPT(GPTConfig(length=16, width=32), layers=2), text_batches(8, 16, 30), next_token_loss),
        (MLP(2, 3), spirals(64, 30), nn.functional.cross_entropy),
        (ConvNet(1, 4, width=8), images(16, 30), nn.functional.cross_entropy),
    ]
    for model, data, loss in cases:
        assert len(chain(model)) == len(list(model.children())) >= 4
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for inputs, targets in data:
            optimizer.zero_grad()
            value = loss(model(inputs), targets)
            value.backward()
            optimizer.step()
            losses.append(value.item())
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])

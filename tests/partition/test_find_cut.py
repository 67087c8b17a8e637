"""`mk.find_cut`: where a model is best cut, by what its blocks really take; and what it says of it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, UNet, balance, next_token_loss


class Uneven(nn.Module):
    """Four blocks, the third as dear as the others together; its first weight is its last one too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 40), nn.Linear(40, 8)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for block in self.blocks:
            y = torch.tanh(block(y))
        return y @ self.words.weight.T


BATCH = torch.randint(5, (6, 3)), torch.randint(5, (6, 3))


def of_words(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def test_flops_are_balanced_and_what_crosses_is_said() -> None:
    found = mk.find_cut(Uneven(), BATCH, 2, loss=of_words, by="flops", microbatches=2)
    assert found.points == ["blocks.3"]
    samples, words = 3, 3
    assert [stage.cost for stage in found.stages] == [
        2 * samples * words * 8 * (8 + 8 + 40),
        2 * samples * words * 320,
    ]
    assert sum(stage.share for stage in found.stages) == pytest.approx(1)
    assert [stage.parameters for stage in found.stages] == [40 + 72 + 72 + 360, 328]
    assert found.sends == {(0, 1): samples * words * 40 * 4}
    assert found.tied == {"words.weight": [0, 1]}
    assert "tied: words.weight, in stages 0, 1" in str(found)
    assert "0      58%" in str(found)


def test_measured_costs_make_contiguous_stages() -> None:
    model = UNet(1, 2, width=4)
    batch = torch.randn(2, 1, 16, 8), torch.randint(2, (2, 16, 8))
    found = mk.find_cut(model, batch, 3, loss=F.cross_entropy)
    whole = mk.find_cut(model, batch, 1, loss=F.cross_entropy).stages[0]
    names = [name for stage in found.stages for name in stage.blocks]
    assert (names[0], names[-1], len(set(names))) == ("down.0", "head", len(names))
    assert sum(stage.parameters for stage in found.stages) == whole.parameters
    assert all(stage.cost > 0 and stage.kept > 0 for stage in found.stages)
    assert [stage.blocks[0] for stage in found.stages[1:]] == found.points


def test_a_chain_is_cut_as_a_plan_cuts_it() -> None:
    model = GPT(layers=4, width=16, heads=2, length=8, vocab=20)
    batch = torch.randint(20, (2, 8)), torch.randint(20, (2, 8))
    found = mk.find_cut(model, batch, 3, loss=next_token_loss, by="flops")
    blocks = [f"block{i}" for i in range(4)]
    names = ["embedding", *blocks, "head"]
    each = found.stages[1].cost / len([name for name in found.stages[1].blocks if name in blocks])
    costs = [0, *[each] * 4, found.stages[2].cost - each * sum(b in blocks for b in found.stages[2].blocks)]
    assert found.points == [names[stage.start] for stage in balance(costs, 3)[1:]]

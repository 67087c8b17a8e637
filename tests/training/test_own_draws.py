"""Which ranks draw the same random numbers, and which their own, wherever in a model something is drawn."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpkit as mk
from tests.serial import Train

pytestmark = pytest.mark.slow

WIDTH, LENGTH = 16, 8


def linear(*, copies: bool) -> nn.Linear:
    """Return a layer that copies its input, or makes 3 of any."""
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(WIDTH)) if copies else layer.weight.zero_()
        layer.bias.fill_(0.0 if copies else 3.0)
    return layer


class Block(nn.Module):
    """A region, `up` to `down`, with something that draws inside of it or after it."""

    def __init__(self, within: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = linear(copies=False), linear(copies=True)
        self.within, self.after = within, after

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.down(self.up(x))
        return self.after(self.down(self.within(self.up(x))))


class Attending(Block):
    """A block that returns the mean over all tokens, which the ranks of cp make together."""

    def forward(self, x: Tensor) -> Tensor:
        v = super().forward(x)[:, None]
        return F.scaled_dot_product_attention(0 * v, 0 * v, v)[:, 0]


class Net(nn.Module):
    def __init__(self, kind: type[Block], within: Any, after: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(within, after) for _ in range(2))
        self.head = linear(copies=True)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = input_ids[..., None].double().expand(*input_ids.shape, WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_own_layer() -> nn.Sequential:
    """A region whose dropout is a layer of a chain."""
    return nn.Sequential(linear(copies=False), nn.ReLU(), nn.Dropout(0.5), linear(copies=True))


def nothing(x: Tensor) -> Tensor:
    return x


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def mask(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape) > 0.5)


def drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty(len(x), 1, 1).bernoulli_(0.5)


def skip_by_python(x: Tensor) -> Tensor:
    return x if random.random() > 0.5 else 0 * x


def features(o: Tensor, _: Tensor) -> Tensor:
    """Measure how the second rank's features differ from the first's."""
    return (o[..., : WIDTH // 2] - o[..., WIDTH // 2 :]).abs().mean()


def tokens(o: Tensor, _: Tensor) -> Tensor:
    """Measure how the second rank's tokens differ from the first's."""
    return (o[:, : LENGTH // 2] - o[:, LENGTH // 2 :]).abs().mean()


def partly(o: Tensor, _: Tensor) -> Tensor:
    """Measure, of means over all tokens, how many are over some of them."""
    return (o * (3 - o)).abs().mean()


def odd(o: Tensor, _: Tensor) -> Tensor:
    """Count means over an odd number of tokens: of two halves that are dropped alike there are none."""
    return (o / 3 * LENGTH).round().remainder(2).mean() + 0 * o.mean()


REGIONS = (mk.tensor.Region("blocks.*", ("blocks.*.up",), "blocks.*.down"),)
TP = {"tp": 2, "tensor": mk.tensor.TensorPlan(REGIONS)}
SP = {
    "tp": 2,
    "sequence_parallel": True,
    "tensor": mk.tensor.TensorPlan(REGIONS, sequence=("blocks.0", "head")),
}
PP = {"pp": 2, "microbatches": 2}
WITHIN = {"cut": ("blocks.1.down",)}  # between a region's layers
FULL = {"recompute": "full"}

OWN = {
    "a layer of a chain": (nn.Sequential(in_own_layer(), in_own_layer()), {"tp": 2}, features),
    "of a chain, cut there": (nn.Sequential(in_own_layer(), in_own_layer()), {"tp": 2, "cut": ("1.2",)} | PP, features),
    "in a region, cut there": (Net(Block, drop, nothing), TP | PP | WITHIN, features),
    "of parts of sequences, cut": (Net(Block, nothing, mask), SP | PP | WITHIN, tokens),
    "of parts of sequences, again": (Net(Block, nothing, drop), SP | FULL, tokens),
    "in a region of whole sequences": (Net(Block, noise, nothing), SP, features),
    "parts of a context": (Net(Attending, mask, nothing), {"cp": 2} | FULL, odd),
}  # fmt: skip
SAME = {
    "samples of parts of sequences": (Net(Block, nothing, drop_path), SP | PP | WITHIN, tokens),
    "samples of parts of a context": (Net(Attending, nothing, drop_path), {"cp": 2} | FULL, partly),
    "a layer, by Python": (Net(Attending, nothing, skip_by_python), {"cp": 2} | FULL, partly),
}


def measured(train: Train, model: nn.Module, plan: dict[str, Any], measure: Any) -> list[float]:
    torch.manual_seed(0)
    x = torch.randint(8, (4, LENGTH))
    chain = isinstance(model, nn.Sequential)
    data = torch.randn(4, WIDTH, dtype=torch.float64) if chain else x
    how = {"loss": measure, "optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "steps": 3}
    return train(model, [(data, data)], mk.Plan(**plan), **how).losses


@pytest.mark.parametrize(("model", "plan", "measure"), OWN.values(), ids=OWN)
def test_ranks_draw_their_own_for_what_they_divide(
    train: Train, model: nn.Module, plan: dict[str, Any], measure: Any
) -> None:
    assert min(measured(train, model, plan, measure)) > 1e-3


@pytest.mark.parametrize(("model", "plan", "measure"), SAME.values(), ids=SAME)
def test_ranks_draw_the_same_for_what_their_parts_share(
    train: Train, model: nn.Module, plan: dict[str, Any], measure: Any
) -> None:
    assert max(measured(train, model, plan, measure)) < 1e-12

"""Models are chains, cut where it is best; structures of every kind are taken apart and put together again."""

from dataclasses import dataclass
from itertools import combinations, pairwise
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mpkit.data import images, spirals, text_batches
from mpkit.models import GPT, MLP, ConvNet, GPTConfig, balance, chain, next_token_loss
from mpkit.strategies.models.chain import is_chain
from mpkit.strategies.models.nested_values import LEAF, flatten, is_opaque, rebuild
from tests.ingredients import Backwards, Doubling

# ---- Models are chains; chains are cut where it is best.


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
    handle = model.register_forward_hook(lambda module, inputs, output: None)
    assert not is_chain(model) and not is_chain(Doubling(nn.ReLU()))
    handle.remove()
    assert is_chain(model)
    model.forward = lambda x: relu(x)  # the forward of this very object
    assert not is_chain(model)


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


# ---- Structures of every kind are taken apart and put together again, and what cannot be is told.

ONE = torch.ones(2)


class Pair(NamedTuple):
    x: Any
    n: int


class Own:
    def __init__(self, x: Any) -> None:
        self.x, self.inner = x, {"list": [x, 1]}


@dataclass(frozen=True, slots=True)
class FrozenData:
    x: Any


@dataclass
class More:
    x: Any

    def __post_init__(self) -> None:
        self.more = self.x  # not a field


KINDS: dict[str, tuple[Any, Any]] = {
    "named tuple": (Pair(ONE, 1), lambda v: v.x), "frozen dataclass": (FrozenData(ONE), lambda v: v.x),
    "dataclass": (More(ONE), lambda v: v.more), "torch's": (torch.max(ONE[None], 1), lambda v: v.values),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_structure_is_taken_apart_and_rebuilt(kind: str) -> None:
    value, take = KINDS[kind]
    leaves, shape = flatten(value)
    made = rebuild(shape, [leaf + 1 if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    assert type(made) is type(value)
    assert torch.equal(take(made), take(value) + 1)
    assert flatten(rebuild(shape, leaves))[1] == shape
    assert not any(map(is_opaque, leaves))


def closing_over(x: Any) -> Any:
    return lambda: x


class Itself:
    def __init__(self) -> None:
        self.me, self.x = self, ONE


@pytest.mark.parametrize(
    "value",
    [
        iter([ONE]), (x for x in [ONE]), closing_over(ONE), Own(ONE).__init__, Own(ONE), Itself(),
        MappingProxyType({"x": ONE}), SimpleNamespace(x=ONE), torch.distributions.Normal(ONE, 1.0),
    ],
    ids=["iterator", "generator", "closure", "method", "object", "a cycle", "a view", "namespace", "distribution"],
)  # fmt: skip
def test_what_cannot_be_looked_into(value: Any) -> None:
    assert flatten(value) == ([value], LEAF)
    assert is_opaque(value)

"""Models and loops that the tests of the wrappers share."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mpkit as mk


class Toy(nn.Module):
    """Tied weights, frozen parameters with and without a gradient's path, a norm, a bias that is not used alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(10)
        self.frozen = nn.Linear(10, 7)
        self.frozen.weight.requires_grad_(False)
        self.last = nn.Linear(7, 5)
        self.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        x = self.second(self.first(x).relu()).relu()
        y: Tensor = self.last(self.frozen(self.norm(x)).tanh())
        return y * scale


class Normed(nn.Module):
    """A BatchNorm, whose buffers each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Branches(nn.Module):
    """Takes one of two layers, or none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(10, 5)
        self.left, self.right, self.never = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, way: str) -> Tensor:
        y: Tensor = self.before(x)
        return getattr(self, way)(y) if way else y


def data(samples: int = 24) -> tuple[Tensor, Tensor]:
    """The same on every rank."""
    source = torch.Generator().manual_seed(5)
    return torch.randn(samples, 10, generator=source), torch.randn(samples, 5, generator=source)


def mine(ctx: Any, tensor: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return tensor.chunk(ctx.world_size)[ctx.rank]


def models(ctx: Any, make: Callable[[], nn.Module] = Toy) -> tuple[nn.Module, nn.Module]:
    """A module from a seed of the rank's own, and the plain one that the first rank began with."""
    torch.manual_seed(ctx.rank)
    other = make()
    torch.manual_seed(0)
    return other, make()


def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two modules' whole states, which have the same names in the same order."""
    left, right = one.state_dict(), other.state_dict()
    assert list(left) == list(right)
    pairs = ((left[name], right[name]) for name in left)
    return max((a.float() - b.float()).abs().max().item() for a, b in pairs)


def proved(wrap: Callable[[Any], Any], module: nn.Module, steps: int = 1) -> Any:
    """Wrap a module whose first steps are compared; `_proof` is the comparison."""
    plain = copy.deepcopy(module)
    model = wrap(module)
    model._proof = mk.prove(model, plain, steps)
    return model


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

"""The backward in two halves: each of them right, apart, and gone with what it alone needed."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mpkit.models import GPT, ConvNet
from mpkit.strategies.stage.split_backward import input_grads
from mpkit.trace.record.flops import count
from mpkit.trace.record.operators import flops_of
from tests.recipes import normal


def outputs_of(stage: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(5)  # dropout
    made = stage(x)
    return [tensor for tensor in (made if isinstance(made, tuple) else (made,)) if tensor.requires_grad]


def check(stage: nn.Module, x: Tensor, *, wants: bool = True) -> tuple[float, float]:
    """Both halves give what one backward gives, W nothing before its time; returns the FLOPs of each."""
    inputs = [x.clone().requires_grad_()] if wants else []
    x = inputs[0] if wants else x
    weights = [p for p in stage.parameters() if p.requires_grad]
    outputs = outputs_of(stage, x)
    gradients = [torch.randn_like(tensor) for tensor in outputs]
    wanted: Sequence[Tensor | None] = (
        torch.autograd.grad(outputs, [*inputs, *weights], gradients, allow_unused=True)
        if outputs
        else [None] * len([*inputs, *weights])
    )
    outputs = outputs_of(stage, x)
    with _Products() as first:
        found, later = input_grads(outputs, gradients, inputs)
    assert all(p.grad is None for p in weights)
    with _Products() as second:
        later.run()
    for made, want in zip([*found, *(p.grad for p in weights)], wanted, strict=True):
        assert (made is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(made, want, rtol=1e-10, atol=1e-12)
    return first.flops, second.flops


class _Products(TorchDispatchMode):
    """Counts the FLOPs of what is computed inside."""

    flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, out)
        return out


def linear(a: int, b: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(a, b, bias=bias).double()


class Tangle(nn.Module):
    """A weight transposed once and used twice, another twice, one that no input meets; five outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b, self.c = (nn.Parameter(normal(*shape)) for shape in ((4, 4), (4,), (4,)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        wt = self.w.t()
        y = (torch.relu(x @ wt) @ wt + self.b) * self.b
        return y, self.c * self.c, self.w.sum() * x, x, self.b


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Hooked(nn.Module):
    """A user's hook on a tensor, which doubles its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(4, 4), linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return self.last(y.sin())


def frozen(which: int) -> nn.Module:
    net = nn.Sequential(linear(4, 5), nn.ReLU(), linear(5, 3))
    net[which].requires_grad_(False)
    return net


STAGES: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(linear(4, 5), nn.GELU(), linear(5, 3), nn.LayerNorm(3).double()),
    "without biases": lambda: nn.Sequential(linear(4, 5, bias=False), nn.ReLU(), linear(5, 3, bias=False)),
    "no weights": lambda: nn.Sequential(nn.Tanh(), nn.ReLU()),
    "nothing": nn.Identity,
    "one weight": lambda: linear(4, 3, bias=False),
    "shared": lambda: Twice(linear(4, 4)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear(4, 4)), nn.Tanh()),
    "weight norm shared": lambda: Twice(nn.utils.parametrizations.weight_norm(linear(4, 4))),
    "batch norm and dropout": lambda: nn.Sequential(
        linear(4, 4), nn.BatchNorm1d(4).double(), nn.Dropout(0.5), linear(4, 2)
    ),
    "first frozen": lambda: frozen(0),
    "last frozen": lambda: frozen(2),
    "all frozen": lambda: frozen(0).requires_grad_(False),
    "a tangle": Tangle,
    "checkpointed": lambda: nn.Sequential(Checkpointed(nn.Sequential(linear(4, 4), nn.GELU())), linear(4, 2)),
    "hooked": Hooked,
}


@pytest.mark.parametrize("wants", [True, False], ids=["inputs want gradients", "inputs want none"])
@pytest.mark.parametrize("kind", STAGES)
def test_both_halves_give_what_one_backward_gives(kind: str, wants: bool) -> None:
    torch.manual_seed(1)
    check(STAGES[kind](), normal(3, 4), wants=wants)


@pytest.mark.parametrize(("stage", "x"), [
    (lambda: list(GPT(layers=2, width=16, heads=2, length=6))[1], torch.randn(2, 6, 16)),
    (lambda: list(ConvNet(1, 4, width=4, layers=3))[1], torch.randn(2, 4, 8, 8)),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(5, 8)),
], ids=["transformer block", "convolution", "linear"])  # fmt: skip
def test_no_product_is_computed_twice_and_each_in_its_half(stage: Callable[[], nn.Module], x: Tensor) -> None:
    torch.manual_seed(2)
    block = stage().double()
    first, second = check(block, x.double())
    flops = count(block, x.double().requires_grad_())
    assert first == flops.input_grad
    assert first + second == flops.backward
    assert first > 0 and second > 0


def test_what_only_the_first_half_needs_goes_with_it() -> None:
    torch.manual_seed(3)
    seen: dict[str, weakref.ref[Tensor]] = {}

    class Watch(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            seen[self.name] = weakref.ref(x.untyped_storage())
            return x

    stage = nn.Sequential(
        nn.Linear(4, 4), Watch("before gelu"), nn.GELU(), Watch("after gelu"), nn.Linear(4, 4), nn.Tanh(), Watch("out")
    )  # fmt: skip
    x = torch.randn(2, 4, requires_grad=True)
    y = stage(x)
    _, later = input_grads([y], [torch.ones_like(y)], [x])
    del y, x
    assert [name for name, ref in seen.items() if ref() is not None] == [
        "after gelu"
    ]  # a linear layer's input
    assert [tuple(gradient.shape) for gradient in later.held_gradients()] == [(2, 4), (2, 4)]
    later.run()
    assert all(ref() is None for ref in seen.values())
    assert not later.held_gradients()

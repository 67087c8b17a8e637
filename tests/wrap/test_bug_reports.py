"""Programs after public bug reports of DDP, DeepSpeed and Accelerate, each wrapped and in a plain loop.

A program is a module and a step of its loop, which the plain loop takes on the whole batch. With a wrapper it ends with
the same weights in float64, or it is refused on every rank with the words in the table. All programs run in one call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from tests.serial import Clusters

Step = Callable[[int, Any, torch.optim.Optimizer, Tensor, Tensor, bool], None]

UNUSED = {"find_unused_parameters": True}


@dataclass
class Program:
    """A module and a loop; `refused` has the words where it is not as the plain loop."""

    module: Callable[[], nn.Module]
    step: Step
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)
    how: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm, self.scale, self.aux = nn.LayerNorm(4), 1.0, torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.a(x))
        self.aux = self.b(x).square().mean()
        out: Tensor = self.h(self.norm(torch.tanh(self.b(x)))) * self.scale
        return out


class Box(dict[str, Any]):
    """What PyTorch's pytree takes for a leaf."""


class Boxed(MLP):
    def __init__(self, box: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.box = box

    def forward(self, x: Tensor) -> Any:
        return self.box(super().forward(x))


class Evaluating(nn.Module):
    """A BatchNorm in eval mode within a module in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.h = nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.h(self.bn(self.a(x)))
        return y


class Odd(nn.Module):
    """Parameters of no dimension, without elements, complex, and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.gain, self.none = (
            nn.Linear(4, 2), nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3)),
        )  # fmt: skip
        self.t = nn.Parameter(torch.randn(4, 4).t()[::2])
        self.c = nn.Parameter(torch.randn(2, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.l(x) * self.gain
            + x @ self.t.t()
            + (torch.fft.fft(self.l(x)) @ self.c).real
            + self.none.sum()
        )


class Teacher(MLP):
    """Holds a teacher, which its forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.t.weight.lerp_(self.a.weight, 0.1)
        return super().forward(x) - self.t(x)[:, :2]


class Looked(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(10, 4, **options), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.h(self.e((x.abs() * 3).long().clamp(max=9)).mean(1))
        return y


def frozen() -> nn.Module:
    module = MLP()
    module.a.requires_grad_(False)
    return module


def inner(model: Any, wrapped: bool) -> Any:
    return model.module if wrapped else model


def of(loss: Callable[[Any, Tensor, Any], Tensor]) -> Step:
    """A step with a loss of the output, the targets and the user's module."""

    def step(_: int, model: Any, optimizer: Any, x: Tensor, y: Tensor, wrapped: bool) -> None:
        optimizer.zero_grad()
        loss(model(x), y, inner(model, wrapped)).backward()
        optimizer.step()

    return step


plain = of(lambda out, y, _: F.mse_loss(out, y))
boxed = of(lambda out, y, _: F.mse_loss(out["out"], y))


def before(change: Callable[[int, Any, bool], Any]) -> Step:
    """A step before which something is done to the model."""

    def step(i: int, model: Any, optimizer: Any, x: Tensor, y: Tensor, wrapped: bool) -> None:
        change(i, model, wrapped)
        plain(i, model, optimizer, x, y, wrapped)

    return step


def between(change: Callable[[Any, Tensor, Any], Any]) -> Step:
    """A step with something between backward and update."""

    def step(_: int, model: Any, optimizer: Any, x: Tensor, y: Tensor, wrapped: bool) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        change(model, x, optimizer)
        optimizer.step()

    return step


def clip(model: Any, *_: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def freeze(i: int, model: Any, wrapped: bool) -> None:
    inner(model, wrapped).b.requires_grad_(i != 1)


def unfreeze(i: int, model: Any, wrapped: bool) -> None:
    inner(model, wrapped).a.requires_grad_(i > 0)


def exchange(i: int, model: Any, _: bool) -> None:
    if i == 1:
        model.h = nn.Linear(4, 2)


def add(i: int, model: Any, wrapped: bool) -> None:
    inner(model, wrapped).more = nn.Linear(2, 2)


def alone(_: int, model: Any, optimizer: Any, x: Tensor, y: Tensor, wrapped: bool) -> None:
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(F.mse_loss(model(x), y), parameters), strict=True):
        p.grad = gradient
    optimizer.step()


def fail(_: int, model: Any, optimizer: Any, x: Tensor, y: Tensor, wrapped: bool) -> None:
    def boom(_: Tensor) -> None:
        raise RuntimeError("boom")

    out = model(x)
    out.register_hook(boom)
    with pytest.raises(RuntimeError, match="boom"):
        F.mse_loss(out, y).backward()
    plain(_, model, optimizer, x, y, wrapped)


PROGRAMS = {
    "output: a subclass of dict": Program(lambda: Boxed(lambda out: Box(out=out)), boxed),
    "output: an iterator": Program(lambda: Boxed(lambda out: iter([out])), boxed, refused="returns list_iterator"),
    "a term that a layer keeps": Program(MLP, of(lambda out, y, m: F.mse_loss(out, y) + m.aux)),
    "a layer in eval mode": Program(Evaluating, plain),
    "an attribute set on the wrapper": Program(MLP, before(lambda i, model, _: setattr(model, "scale", 1.0 + i))),
    "frozen while others train": Program(MLP, before(freeze), how=UNUSED),
    "frozen, not allowed": Program(MLP, before(freeze), refused="b.bias was frozen after"),
    "unfrozen": Program(frozen, before(unfreeze), refused="a.bias was frozen when"),
    "a layer exchanged": Program(MLP, before(exchange), refused="h.weight was exchanged"),
    "a layer added": Program(MLP, before(add), refused="more.weight was added"),
    "odd parameters, clipped": Program(Odd, between(clip)),
    "torch.autograd.grad": Program(MLP, alone, refused="this rank's own"),
    "a layer called by itself": Program(
        MLP,
        of(lambda out, y, m: F.mse_loss(out, y) + m.norm(torch.cat([out, out], 1)).pow(3).mean()),
    ),
    "a parameter written in the forward": Program(Teacher, plain),
    "an embedding with max_norm": Program(lambda: Looked(max_norm=1.0), plain, refused="max_norm=1.0"),
    "an embedding scaled by frequency": Program(
        lambda: Looked(scale_grad_by_freq=True), plain, refused="scale_grad_by_freq=True"
    ),
    "an embedding, sparse gradients": Program(lambda: Looked(sparse=True), plain, refused="sparse=True"),
    "a backward that failed": Program(MLP, fail),
}  # fmt: skip


def run(ctx: Any, names: list[str]) -> dict[str, Any]:
    """How far each program comes apart from the plain loop in three steps; or what it is refused with."""
    torch.set_default_dtype(torch.float64)
    try:
        return {name: _apart(ctx, PROGRAMS[name]) for name in names}
    finally:
        torch.set_default_dtype(torch.float32)


def _apart(ctx: Any, program: Program) -> Any:
    torch.manual_seed(0)
    module = program.module()
    torch.manual_seed(0)
    other = program.module()
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    mine = [part.chunk(ctx.world_size)[ctx.rank] for part in (x, y)]
    theirs = program.optimizer(other.parameters())
    try:
        model = mk.ddp(module, bucket_mb=1e-4, **program.how)
        optimizer = program.optimizer(model.parameters())
        for i in range(3):
            torch.manual_seed(i)
            program.step(i, model, optimizer, *mine, True)
            torch.manual_seed(i)
            program.step(i, other, theirs, x, y, False)
        one, two = model.state_dict(), other.state_dict()
        return max((one[name] - two[name]).abs().max().item() for name in two if two[name].numel())
    except (ValueError, RuntimeError, mk.errors.MpkitError) as error:
        return str(error)


def test_a_program_is_as_the_plain_loop_or_refused(clusters: Clusters) -> None:
    for found in clusters(2).run(run, list(PROGRAMS)):
        for name, program in PROGRAMS.items():
            words, what = program.refused, found[name]
            right = words in str(what) if words else isinstance(what, float) and what < 1e-12
            assert right, f"{name}: {what}"

"""What mpkit catches and does not raise is reported: by no broad `except` is anything decided in silence."""

import ast
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import mpkit as mk
from mpkit.strategies.prepare.prepare import prepare
from tests.recipes import sgd
from tests.words import parse

PACKAGE = Path(mk.__file__).parent


BROAD = {"Exception", "BaseException"}


def silent(source: str) -> Iterator[int]:
    """The lines at which a source catches everything, without raising and without looking at what it caught."""
    for node in ast.walk(parse(source)):
        match node:
            case ast.ExceptHandler(type=kind, name=name, body=body) if kind is None or catches_all(kind):
                inside = [inner for statement in body for inner in ast.walk(statement)]
                raises = any(isinstance(inner, ast.Raise) for inner in inside)
                uses = any(isinstance(inner, ast.Name) and inner.id == name for inner in inside)
                if not raises and not uses:
                    yield node.lineno
            case ast.Call(func=func, args=args) if last_name(func) == "suppress" and any(
                map(catches_all, args)
            ):
                yield node.lineno


def catches_all(kind: ast.expr) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(last_name(each) in BROAD for each in kinds)


def last_name(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def test_nothing_is_caught_in_silence() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in silent(path.read_text(encoding="utf-8"))
    ]
    assert not found, "name the exceptions, raise, or report what was caught (mpkit.common.exceptions)"


class Odd(Exception):
    """An error that is none of torch's."""


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4)


class OnReal(nn.Module):
    """A layer that refuses tensors without content, with an error of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            raise Odd("no numbers")
        return x


class Looks(nn.Module):
    """A layer whose control flow depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else x * 1.0


def net(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))


def prepared(model: nn.Module, plan: mk.Plan, data: Any = ((X, Y),), loss: Any = F.mse_loss) -> Any:
    how: dict[str, Any] = {"ranks": plan.ranks, "steps": len(data), "optimizer": sgd}
    return prepare(model, list(data), plan, loss=loss, **how)


def reports(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(each.category is mk.errors.UnwisePlan for each in caught)
    return [str(each.message) for each in caught]


def test_a_layer_that_only_fake_tensors_fail_in() -> None:
    (said,) = reports(lambda: prepared(net(OnReal()), mk.Plan.serial()))
    assert said.startswith("A micro-batch of Sequential was computed for real") and "Odd: no numbers" in said
    assert reports(lambda: prepared(net(Looks()), mk.Plan.serial())) == []

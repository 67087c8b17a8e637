"""Structures of every kind are taken apart and put together again, and what cannot be is told."""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import attr
import pytest
import torch
from torch import Tensor

from mpkit.strategies.models.nested_values import LEAF, flatten, is_opaque, rebuild

ONE = torch.ones(2)


class Pair(NamedTuple):
    x: Any
    n: int


class Own:
    def __init__(self, x: Any) -> None:
        self.x, self.inner = x, {"list": [x, 1]}


@attr.define(frozen=True)
class Frozen:
    x: Any


@dataclass(frozen=True, slots=True)
class FrozenData:
    x: Any


@dataclass
class More:
    x: Any

    def __post_init__(self) -> None:
        self.more = self.x  # not a field


KINDS: dict[str, tuple[Any, Any]] = {
    "named tuple": (Pair(ONE, 1), lambda v: v.x),
    "object": (Own(ONE), lambda v: v.inner["list"][0]),
    "attrs": (Frozen(ONE), lambda v: v.x),
    "frozen dataclass": (FrozenData(ONE), lambda v: v.x),
    "dataclass": (More(ONE), lambda v: v.more),
    "namespace": (SimpleNamespace(x=(ONE, None)), lambda v: v.x[0]),
    "user dict": (collections.UserDict(x=ONE), lambda v: v["x"]),
    "partial": (functools.partial(torch.add, ONE), lambda v: v.args[0]),
    "distribution": (torch.distributions.Normal(ONE, 1.0), lambda v: v.loc),
    "torch's": (torch.max(ONE[None], 1), lambda v: v.values),
}


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
    [iter([ONE]), (x for x in [ONE]), closing_over(ONE), Own(ONE).__init__, Itself(), MappingProxyType({"x": ONE})],
    ids=["iterator", "generator", "closure", "method", "a cycle", "a view"],
)  # fmt: skip
def test_what_cannot_be_looked_into(value: Any) -> None:
    assert flatten(value) == ([value], LEAF)
    assert is_opaque(value)

"""Shard: the part of a whole parameter that a rank of a tensor-parallel or expert-parallel group holds.

A column-parallel linear layer divides its output features, a row-parallel one its input features, an embedding its
vocabulary, expert parallelism the experts: one dimension of the parameter. A rank holds one range of it, or several if
layers were fused (q, k and v in one projection). Shards are uneven if the number of ranks does not divide the width.
Experts can be divided along two axes: the experts along ep, and the features of each along tp.

    W, whole (6 x 3)              dim 0, t = 2: rank 0 has rows 0 to 2, rank 1 rows 3 to 5
    q k v in one, (3h x h)        dim 0: rank 0 has the first half of the rows of q, of k and of v
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mpkit.plan.tensor_plan import TensorPlan
from mpkit.strategies.models.own_draws import OwnDraws


def evenly(count: int, t: int) -> list[range]:
    """Divide `count` things into t ranges; if t does not divide it, the first ones are longer by one.

    >>> evenly(5, 2)
    [range(0, 3), range(3, 5)]
    """
    sizes = [count // t + (i < count % t) for i in range(t)]
    return [range(a, b) for a, b in pairwise([0, *accumulate(sizes)])]


@dataclass(frozen=True)
class Shard:
    """The local part of a whole parameter: its ranges of one dimension, concatenated.

    >>> shard = Shard((6, 2), 0, (range(0, 1), range(3, 4)))
    >>> shard.take(torch.arange(12).view(6, 2))
    tensor([[0, 1],
            [6, 7]])
    >>> shard.shape
    (2, 2)
    >>> Shard((6, 2), 0, (range(2, 4),), across=Shard((6, 2), 1, (range(1, 2),))).take(torch.arange(12).view(6, 2))
    tensor([[5],
            [7]])
    """

    whole: tuple[int, ...]  # shape of the whole parameter
    dim: int
    ranges: tuple[range, ...]
    across: Shard | None = None  # of another dimension that is divided too

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local parameter."""
        others = self.whole if self.across is None else self.across.shape
        return (*others[: self.dim], sum(map(len, self.ranges)), *others[self.dim + 1 :])

    @property
    def ranges_by_dim(self) -> tuple[tuple[range, ...], ...]:
        """The local ranges of each dimension of the whole parameter.

        >>> Shard((6, 2), 0, (range(0, 1), range(3, 4))).ranges_by_dim
        ((range(0, 1), range(3, 4)), (range(0, 2),))
        """
        others = [(range(size),) for size in self.whole] if self.across is None else self.across.ranges_by_dim
        return (*others[: self.dim], self.ranges, *others[self.dim + 1 :])

    @property
    def axis_name(self) -> str:
        """What the ranges count: "rows", "columns", or "elements" of a vector; also for experts' [E, rows, columns]."""
        matrix = self.dim - (len(self.whole) == 3)
        return "elements" if len(self.whole) == 1 else "columns" if matrix == 1 else "rows"

    def take(self, whole: Tensor) -> Tensor:
        """Return the local part of a whole tensor, as a copy."""
        whole = whole if self.across is None else self.across.take(whole)
        parts = [whole.narrow(self.dim, part.start, len(part)) for part in self.ranges]
        return torch.cat(parts, self.dim)

    def put(self, local: Tensor, whole: Tensor) -> None:
        """Write the local part to its place in a whole tensor."""
        parts = local.split([len(part) for part in self.ranges], self.dim)
        for part, values in zip(self.ranges, parts, strict=True):
            place = whole.narrow(self.dim, part.start, len(part))
            if self.across is None:
                place.copy_(values)
            else:
                self.across.put(values, place)


@dataclass(frozen=True)
class ShardedModel:
    """The result of sharding a model's parameters, on one rank.

    Attributes:
        shards: the parts of divided parameters, by every name that a parameter has; other parameters are absent.
        partial: names of parameters that tp leaves whole, whose gradients are partial sums on each of its ranks.
        plan: the applied plan, with the model's own names.
        draws: where this rank draws random numbers of its own.
        along: the axis of shards that do not lie along tp, by the same names: "ep" for experts.
        attention: makes the context manager of a forward from what counts the pairs of a query and a key.
    """

    shards: dict[str, Shard] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    plan: TensorPlan = field(default_factory=lambda: TensorPlan(()))
    draws: OwnDraws = field(default_factory=OwnDraws, compare=False)
    along: Mapping[str, str] = field(default_factory=dict)
    attention: Callable[..., AbstractContextManager[Any]] = field(default=nullcontext, compare=False)

    @property
    def experts(self) -> frozenset[str]:
        """The names of parameters that are divided by expert."""
        return frozenset(name for name, axis in self.along.items() if axis == "ep")

    def axis_of(self, name: str) -> str:
        """Return the axis along which a parameter is divided; "" if it is whole."""
        return self.along.get(name, "tp") if name in self.shards else ""


Place: TypeAlias = tuple[Any, ...]
"""The whole shape, the ranges by divided dimension (the outermost last), and the first element."""


class HeldPart(NamedTuple):
    """What a rank holds of a tensor: elements of its local part, flattened, from `start` on (ZeRO)."""

    tensor: Tensor  # those elements, in one dimension
    whole: tuple[int, ...]  # shape of the whole tensor
    start: int = 0
    shard: Shard | None = None  # the local part; None if all of the tensor is

    @classmethod
    def of_shard(cls, shard: Shard, local: Tensor) -> HeldPart:
        """Return all of a shard as a part."""
        return cls(local.reshape(-1), shard.whole, 0, shard)

    @property
    def place(self) -> Place:
        """The place of the elements, in numbers.

        >>> HeldPart(torch.zeros(3), (4, 2), 1, Shard((4, 2), 0, (range(2, 4),))).place
        ((4, 2), ((0, ((2, 4),)),), 1)
        """
        divided, shard = [], self.shard
        while shard is not None:
            divided.append((shard.dim, tuple((part.start, part.stop) for part in shard.ranges)))
            shard = shard.across
        return tuple(self.whole), tuple(divided), self.start

    def take(self, whole: Tensor) -> Tensor:
        """Return these elements of a whole tensor, in one dimension."""
        local = whole if self.shard is None else self.shard.take(whole)
        return local.reshape(-1)[self.start : self.start + self.tensor.numel()]


def put_together(parts: Sequence[HeldPart]) -> Tensor:
    """Assemble a whole tensor from its parts; it is 0 where no part is, and the last one's value where several are.

    >>> put_together([HeldPart(torch.full((2,), float(i)), (2, 2), 2 * i) for i in range(2)])
    tensor([[0., 0.],
            [1., 1.]])
    """
    whole = parts[0].tensor.new_zeros(parts[0].whole)
    local: dict[Shard | None, Tensor] = {None: whole}
    for part in parts:
        if part.shard is not None and part.shard not in local:
            local[part.shard] = whole.new_zeros(part.shard.shape)
        local[part.shard].view(-1)[part.start : part.start + part.tensor.numel()] = part.tensor
    for shard, values in local.items():
        if shard is not None:
            shard.put(values, whole)
    return whole


def put_together_by_name(
    names: Iterable[str], ranks: Iterable[Mapping[str, Tensor | HeldPart]]
) -> dict[str, Tensor]:
    """Assemble the named entries of a state dict from each rank's whole tensors, and parts that cover the others."""
    state: dict[str, Tensor] = {}
    parts: dict[str, list[HeldPart]] = {}
    for mine in ranks:
        for name, value in mine.items():
            if isinstance(value, HeldPart):
                parts.setdefault(name, []).append(value)
            else:
                state[name] = value
    return {name: put_together(parts[name]) if name in parts else state[name] for name in names}

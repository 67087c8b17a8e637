"""Sharding of a model in place, for one rank of a tensor-parallel group.

    resolve     match the plan's patterns with the model's names
    shards      determine which part of which parameter is this rank's
    replace     replace each divided parameter by its part; names and modules stay
    work        set hooks and forwards: regions, embeddings, head, sequence

Ranks send nothing: each takes its part of the whole model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from mpkit.plan.tensor_plan import Region, TensorPlan
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.models.own_draws import OwnDraws
from mpkit.strategies.stage.shard import Shard, ShardedModel, evenly
from mpkit.strategies.tensor.known_plans import find_tensor_plan
from mpkit.strategies.tensor.operators import gather_features
from mpkit.strategies.tensor.region import (
    Finish,
    RegionAtWork,
    divide_sequence,
    is_across,
    is_linear,
    modules_between,
)
from mpkit.strategies.tensor.resolve import check, divide
from mpkit.strategies.tensor.vocabulary import DividedLogits, divide_embedding

__all__ = ["ShardedModel", "Shards", "localize", "partial_sums", "shard_model", "shards_of"]


def shards_of(model: nn.Module, group: Communicator, plan: TensorPlan) -> Shards:
    """Return the shards of all parameters that the plan divides."""
    shards = Shards(model, group)
    for region in plan.regions:
        assert not isinstance(region.heads, str)
        for name in region.column:
            shards.add_outputs(name, region.heads, region.sections)
        if region.row is not None:
            shards.add_inputs(region.row, region.heads)
        for name in region.per_head:
            shards.add(name, -1, region.heads)
    for name in plan.embeddings:
        shards.add(f"{name}.weight", 0)
    if plan.head is not None:
        shards.add_outputs(plan.head)
    shards.check_shared()
    return shards


def weight_of(layer: str) -> str:
    """Return the name of a layer's weight."""
    return f"{layer}.weight" if layer else "weight"


class Shards:
    """One rank's parts of a model's parameters."""

    def __init__(self, model: nn.Module, group: Communicator) -> None:
        self._index, self._size = group.index, group.size
        self._modules = dict(model.named_modules())
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._names: dict[int, list[str]] = {}
        for name, parameter in self._parameters.items():
            self._names.setdefault(id(parameter), []).append(name)
        self._asked: set[str] = set()
        self.found: dict[str, Shard] = {}  # by every name that a divided parameter has

    def add(self, name: str, dim: int, heads: int | None = None, sections: tuple[int, ...] = (1,)) -> None:
        """Divide a dimension of a parameter, under all of its names, in whole heads, and each section by itself."""
        module, _, key = name.rpartition(".")
        self._asked.add(module)
        whole = self._parameters.get(name)
        if whole is None:
            if getattr(self._modules[module], key) is None:  # a layer without a bias
                return
            raise ValueError(
                f"TensorPlan: {name} is no parameter, but computed from others (by weight_norm, "
                f"spectral_norm or another parametrization), and cannot be divided. What works: a TensorPlan without "
                f"{module}, or Plan.ddp({self._size})"
            )
        dim %= whole.dim()
        part = divide(whole.shape[dim], self._size, heads, sections)[self._index]
        shard = Shard(tuple(whole.shape), dim, part)
        names = self._names[id(whole)]
        for each in names:
            if self.found.setdefault(each, shard) != shard:
                raise ValueError(
                    f"TensorPlan: {name} is divided in two ways, {self.found[each]} and {shard}. It is "
                    f"named {' and '.join(names)}, and has to be divided alike everywhere"
                )

    def add_outputs(self, layer: str, heads: int | None = None, sections: tuple[int, ...] = (1,)) -> None:
        """Divide a layer, or a parameter [..., outputs, inputs], by columns."""
        if layer in self._parameters:
            return self.add(layer, -2, heads, sections)
        self.add(weight_of(layer), 1 if is_across(self._modules[layer]) else 0, heads, sections)
        self.add(f"{layer}.bias" if layer else "bias", 0, heads, sections)

    def add_inputs(self, layer: str, heads: int | None) -> None:
        """Divide a layer, or a parameter [..., outputs, inputs], by rows; a bias stays whole."""
        if layer in self._parameters:
            return self.add(layer, -1, heads)
        self.add(weight_of(layer), 0 if is_across(self._modules[layer]) else 1, heads)

    def check_shared(self) -> None:
        """Check that every layer that shares a divided parameter is divided too."""
        for names in self._names.values():
            modules = {name.rpartition(".")[0]: name for name in names if name in self.found}
            for module, name in modules.items():
                layer = self._modules[module]
                embedding = isinstance(layer, nn.Embedding)
                if module in self._asked or not (embedding or is_linear(layer)):
                    continue
                how = f"embeddings=({module!r},)" if embedding else f"head={module!r}, or a Region"
                raise ValueError(
                    f"TensorPlan: {name} is the same parameter as {next(m for m in modules if m in self._asked)}'s, "
                    f"which is divided, and the plan does not divide {module}: {how} does"
                )

    def replace(self) -> None:
        """Replace whole parameters by their parts; shared parameters stay shared."""
        parts: dict[int, nn.Parameter] = {}
        for name, module in self._modules.items():
            for key, parameter in module._parameters.items():
                shard = self.found.get(f"{name}.{key}" if name else key)
                if parameter is None or shard is None:
                    continue
                if id(parameter) not in parts:
                    local = shard.take(parameter.detach())
                    parts[id(parameter)] = nn.Parameter(local, parameter.requires_grad)
                module._parameters[key] = parts[id(parameter)]


def localize(entry: nn.Module, region: Region, group: Communicator) -> None:
    """Set the entry's counts of heads, or of features of heads, to those of this rank."""
    assert not isinstance(region.heads, str)
    for name in region.local:
        count = getattr(entry, name)
        (mine,) = divide(count, group.size, region.heads)[group.index]
        setattr(entry, name, len(mine))


def partial_sums(model: nn.Module, plan: TensorPlan, shards: Shards, *, sequence: bool) -> frozenset[str]:
    """Return the whole parameters that are used on a part of the sequence or, inside of a region, of the features."""
    entries = tuple(region.entry for region in plan.regions if region.row is not None)
    after_g = {f"{region.row}.bias" for region in plan.regions}
    on_parts = modules_between(model, *plan.sequence) if sequence and plan.sequence else set()
    names = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        inside = any(module == entry or module.startswith(f"{entry}.") for entry in entries)
        if name not in shards.found and (module in on_parts or (inside and name not in after_g)):
            names.add(name)
    return frozenset(names)


def shard_model(
    model: nn.Module, group: Communicator, plan: TensorPlan | None = None, *, sequence: bool = False,
    overlap: bool = True, whole: Collection[str] = (),
) -> ShardedModel:  # fmt: skip
    """Shard a model in place for the rank at `group.index`, and let its forward work together with the other ranks'.

    >>> from mpkit.models import GPT
    >>> from mpkit.strategies.comm.fake_group import FakeGroup
    >>> model = GPT(layers=1, width=8, heads=2)
    >>> sharded = shard_model(model, FakeGroup(2))
    >>> model.block0.attention.qkv.weight.shape, sharded.shards["block0.attention.qkv.weight"].ranges
    (torch.Size([12, 8]), (range(0, 4), range(8, 12), range(16, 20)))

    Args:
        model: the whole model; changed in place.
        plan: the layers to divide; None for `find_tensor_plan(model)`.
        sequence: divide the layers between regions by sequence, as the plan's `sequence` says.
        overlap: sum the gradients of a region's input while computing those of its weights. A split backward needs
            plain layers, so False; with `sequence`, these keep their whole input for the backward, not only this
            rank's part of it.
        whole: modules to leave whole.

    Raises:
        ValueError: as for `check`.
    """
    if group.size == 1:
        return ShardedModel()
    # ---- resolve
    plan = _leave_whole(find_tensor_plan(model) if plan is None else plan, set(whole))
    # Once more, now with the model's names.
    plan = _leave_whole(check(model, group.size, plan, sequence=sequence), set(whole))
    # ---- shards
    shards = shards_of(model, group, plan)
    sums = partial_sums(model, plan, shards, sequence=sequence)
    # ---- replace
    modules = dict(model.named_modules())
    finishes = [_finishes(region, group, shards) for region in plan.regions]
    shards.replace()
    # ---- work
    draws = OwnDraws()
    on_parts = modules_between(model, *plan.sequence) if sequence and plan.sequence else set()
    for region, finish in zip(plan.regions, finishes, strict=True):
        localize(modules[region.entry], region, group)
        RegionAtWork(
            group, region.entry, modules[region.entry],
            {modules[name]: finish[name] for name in region.column if name in modules},
            None if region.row is None else modules.get(region.row), draws,
            sequence=region.entry in on_parts, overlap=overlap, region=region,
        )  # fmt: skip
    _divide_vocabulary(modules, group, plan, shards, overlap=overlap)
    if sequence and plan.sequence is not None:
        divide_sequence(model, group, draws, *plan.sequence)
    return ShardedModel(shards.found, sums, plan, draws)


def _leave_whole(plan: TensorPlan, whole: set[str]) -> TensorPlan:
    """Return the plan without these modules."""
    return replace(
        plan,
        regions=tuple(r for r in plan.regions if not whole & {r.entry, *r.column, r.row}),
        embeddings=tuple(name for name in plan.embeddings if name not in whole),
        head=None if plan.head in whole else plan.head,
    )


def _finishes(region: Region, group: Communicator, shards: Shards) -> dict[str, Finish | None]:
    """Return how to gather each column layer's outputs, without a row layer; None: they stay divided."""
    finishes: dict[str, Finish | None] = dict.fromkeys(region.column)
    for name in region.column if region.row is None else ():
        shard = shards.found[weight_of(name)]
        sizes = [len(part) for part in evenly(shard.whole[shard.dim], group.size)]
        finishes[name] = partial(gather_features, group, sizes=sizes)
    return finishes


def _divide_vocabulary(
    modules: dict[str, nn.Module], group: Communicator, plan: TensorPlan, shards: Shards, *, overlap: bool
) -> None:
    """Divide the embeddings, and the head with its logits."""
    for name in plan.embeddings:
        embedding: Any = modules[name]
        shard = shards.found[weight_of(name)]
        divide_embedding(group, embedding, shard.ranges[0], shard.whole[0])
    if plan.head is None:
        return
    head = modules[plan.head]
    shard = shards.found[weight_of(plan.head)]
    vocabulary = tuple(evenly(shard.whole[shard.dim], group.size))
    logits = partial(DividedLogits.make, group, vocabulary)
    RegionAtWork(group, plan.head, head, {head: logits}, None, OwnDraws(), sequence=False, overlap=overlap)

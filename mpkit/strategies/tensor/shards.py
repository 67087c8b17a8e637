"""Shards: which part of each parameter a rank has according to a plan, and replacing whole parameters by parts."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpkit.plan.tensor_plan import Region, TensorPlan
from mpkit.strategies.comm.process_group import ProcessGroup
from mpkit.strategies.stage.shard import Shard
from mpkit.strategies.tensor.region import is_across, is_linear
from mpkit.strategies.tensor.resolve import divide, widths
from mpkit.strategies.tensor.sequence import modules_between

__all__ = ["Shards", "localize", "partial_sums", "shards_of"]


def shards_of(model: nn.Module, group: ProcessGroup, plan: TensorPlan) -> Shards:
    """Return the shards of everything that the plan divides.

    Args:
        plan: the plan, resolved by `check`.
    """
    shards, t = Shards(model, group), group.size
    for region in plan.regions:
        assert not isinstance(region.heads, str)
        for name in region.column:
            shards.add_outputs(name, divide(shards.widths(name)[1], t, region.heads, region.sections))
        if region.row is not None:
            shards.add_inputs(region.row, divide(shards.widths(region.row)[0], t, region.heads))
        for name in region.per_head:
            shards.add_last(name, t, region.heads)
    for name in plan.embeddings:
        shards.add(name, "weight", 0, divide(shards.vocabulary(name), t, None))
    if plan.head is not None:
        shards.add_outputs(plan.head, divide(shards.widths(plan.head)[1], t, None))
    shards.check_shared()
    return shards


class Shards:
    """One rank's parts of a model's parameters.

    Attributes:
        found: the shards, by every name that a divided parameter has.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self._index, self._size = group.index, group.size
        self._modules = dict(model.named_modules())
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._asked: set[str] = set()
        self.found: dict[str, Shard] = {}

    def add(self, module: str, parameter: str, dim: int, parts: list[tuple[range, ...]]) -> None:
        """Divide a parameter, under all of its names.

        Raises:
            ValueError: it is divided in another way under another name.
        """
        whole = getattr(self._modules[module], parameter)
        self._asked.add(module)
        if whole is None:
            return
        if id(whole) not in self._names:
            raise ValueError(
                f"TensorPlan: {module}.{parameter} is no parameter, but computed from others (by weight_norm, "
                f"spectral_norm or another parametrization), and cannot be divided. What works: a TensorPlan without "
                f"{module}, or Plan.ddp({self._size})"
            )
        shard = Shard(tuple(whole.shape), dim, parts[self._index])
        names = self._names[id(whole)]
        for name in names:
            if self.found.setdefault(name, shard) != shard:
                raise ValueError(
                    f"TensorPlan: {module}.{parameter} is divided in two ways, {self.found[name]} and {shard}. It is "
                    f"named {' and '.join(names)}, and has to be divided alike everywhere"
                )

    def add_outputs(self, layer: str, parts: list[tuple[range, ...]]) -> None:
        """Divide a layer by columns."""
        if layer not in self._modules:
            return self.add(*self._split_name(layer), self._parameter(layer).dim() - 2, parts)
        self.add(layer, "weight", 1 if is_across(self._modules[layer]) else 0, parts)
        self.add(layer, "bias", 0, parts)

    def add_inputs(self, layer: str, parts: list[tuple[range, ...]]) -> None:
        """Divide a layer by rows; its bias stays whole."""
        if layer not in self._modules:
            return self.add(*self._split_name(layer), self._parameter(layer).dim() - 1, parts)
        self.add(layer, "weight", 0 if is_across(self._modules[layer]) else 1, parts)

    def add_last(self, name: str, t: int, heads: int | None) -> None:
        """Divide a parameter by its last dimension, the heads."""
        whole = self._parameter(name)
        self.add(*self._split_name(name), whole.dim() - 1, divide(whole.shape[-1], t, heads))

    def _split_name(self, parameter: str) -> tuple[str, str]:
        module, _, name = parameter.rpartition(".")
        return module, name

    def _parameter(self, name: str) -> nn.Parameter:
        module, key = self._split_name(name)
        parameter: nn.Parameter = getattr(self._modules[module], key)
        return parameter

    def of_weight(self, layer: str) -> Shard:
        """Return the shard of a divided layer's weight."""
        return self.found[f"{layer}.weight" if layer else "weight"]

    def widths(self, layer: str) -> tuple[int, int]:
        """Return a layer's inputs and outputs before it is divided."""
        return widths(self._modules[layer] if layer in self._modules else self._parameter(layer))

    def vocabulary(self, embedding: str) -> int:
        """Return the number of tokens of an embedding."""
        weight: Any = self._modules[embedding].weight
        return int(weight.shape[0])

    def check_shared(self) -> None:
        """Check that every layer that shares a divided parameter is divided too.

        Raises:
            ValueError: one is not.
        """
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


def localize(entry: nn.Module, region: Region, group: ProcessGroup) -> None:
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
    on_parts: set[str] = set()
    if sequence and plan.sequence is not None:
        on_parts = modules_between(model, *plan.sequence)
    names = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        inside = any(module == entry or module.startswith(f"{entry}.") for entry in entries)
        if name not in shards.found and (module in on_parts or (inside and name not in after_g)):
            names.add(name)
    return frozenset(names)

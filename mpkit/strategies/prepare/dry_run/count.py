"""FLOPs and bytes layer by layer, once the shapes between the layers are known."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.partition.boundary import Boundary, LayerNumbers
from mpkit.trace.record.flops import Flops, count

__all__ = ["LayerOutput", "count_layers", "make"]


UNKNOWN = Flops(why="what the layer before it returns is not known before the run")


class LayerOutput(NamedTuple):
    """A layer's output, None if it cannot be sent, and whether the layer writes into its inputs."""

    output: Boundary | None
    in_place: bool


def count_layers(
    model: nn.Module,
    inputs: Value,
    targets: Value,
    loss: Callable[[Any, Any], Any],
    passed: list[LayerOutput],
) -> list[LayerNumbers]:
    """Return the FLOPs and bytes of each layer, and last those of the loss; 0 where they cannot be counted.

    Identical layers, such as the blocks of a transformer, are counted once.
    """
    counted: dict[Hashable, Flops] = {}
    numbers = []
    given: Boundary | None = None
    for i, ((_, layer), (output, in_place)) in enumerate(zip(layers_of(model), passed, strict=True)):
        if i == 0:
            flops = _count_first(layer, inputs)
        else:
            key = (make(layer), given)
            if key not in counted:
                counted[key] = count(layer, *_empty(given)) if given is not None else UNKNOWN
            flops = counted[key]
        numbers.append(LayerNumbers(flops, output, in_place))
        given = output
    last = count(loss, *_empty(given), targets) if given is not None else UNKNOWN
    return [*numbers, LayerNumbers(last, None)]


def _count_first(layer: nn.Module, inputs: Value) -> Flops:
    """Count the model's first layer, with its inputs by position or by name."""
    if not isinstance(inputs, dict):
        return count(layer, *(inputs if isinstance(inputs, tuple) else (inputs,)))
    return count(lambda named: layer(**named), inputs)


def _empty(boundary: Boundary) -> tuple[Tensor | tuple[Tensor, ...]]:
    """Return tensors of arbitrary content with the specs of this boundary, as the argument of the next layer."""
    tensors = tuple(
        torch.empty(spec.shape, dtype=spec.dtype, requires_grad=spec.requires_grad) for spec in boundary.specs
    )
    return (boundary.pack(tensors),)


def make(layer: nn.Module) -> Hashable:
    """Return a key that is equal for layers that compute the same, apart from the content of their tensors.

    The key consists of the classes and plain settings of all modules within, and the shapes of their tensors. Any
    other object that a module holds makes its key unique.

    >>> make(nn.Linear(2, 3)) == make(nn.Linear(2, 3)), make(nn.Dropout(0.1)) == make(nn.Dropout(0.2))
    (True, False)
    """
    parts: list[Hashable] = []
    for name, module in layer.named_modules():
        settings = tuple(
            (key, value if _is_plain(value) else id(value))
            for key, value in sorted(vars(module).items())
            if not key.startswith("_")
        )
        hooks = tuple(
            id(hook) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )
        own = (*module._parameters.items(), *module._buffers.items())
        tensors = tuple(
            (key, None if value is None else (tuple(value.shape), value.dtype, value.requires_grad))
            for key, value in own
        )
        parts.append((name, type(module), settings, hooks, tensors))
    return tuple(parts)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))

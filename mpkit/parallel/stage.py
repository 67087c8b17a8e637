"""Stage: a contiguous part of the model, its forward and its backward for one micro-batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.models.blocks import repeated_blocks
from mpkit.models.chain import prefix_of
from mpkit.parallel.anymodel.structure import flatten, rebuild
from mpkit.parallel.block_recompute import Around, RecomputedBlock
from mpkit.parallel.microbatch import Value, map_tensors
from mpkit.parallel.randomness import Draws, may_draw
from mpkit.parallel.shard import Sharded

__all__ = ["PRECISIONS", "Stage", "call", "cast"]

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What a Plan that does not compute in the model's own precision computes in."""


class Stage:
    """Some layers of a chain, on a device.

    Attributes:
        number: which stage it is.
        layers: the layers, in order, by name.
        names: those that the model knows them by.
        sharded: which of its parameters are parts of the model's.
        blocks: the model's repeated blocks, on this stage or not.
        recomputed: those here that compute themselves again in the backward.
    """

    def __init__(
        self,
        number: int,
        layers: list[tuple[str, nn.Module]],
        device: torch.device,
        *,
        in_place: bool = False,
        sharded: Sharded | None = None,
        blocks: Collection[nn.Module] | None = None,
    ) -> None:
        self.number = number
        self.sharded = sharded or Sharded()
        self.names = [name for name, _ in layers]
        # An nn.Module allows no dots in a name, and no empty one.
        named = OrderedDict((name.replace(".", "/") or "model", layer) for name, layer in layers)
        self.layers = nn.Sequential(named).to(device)
        self.blocks = set(repeated_blocks(self.layers).values() if blocks is None else blocks)
        self.recomputed: list[RecomputedBlock] = []
        self._in_place = in_place
        self._draws = [may_draw(layer) for layer in self.layers]

    def __call__(self, inputs: Value, draws: Draws) -> Any:
        """The output for a stage's input: of stage 0 whatever the model is called with, else what the one before gave.

        The input stays as it is, also where a layer works in place: backward or recomputation need it.

        Args:
            inputs: the stage's.
            draws: the random numbers for its layers.
        """
        if self._in_place:
            inputs = map_tensors(torch.clone, inputs)
        value: Any = inputs
        for i, layer in enumerate(self.layers):
            if self._draws[i]:
                draws.begin(self.names[i])
            value = call(layer, value, first=i == 0 and self.number == 0)
        return value

    @contextmanager
    def recomputing(self, around: Around) -> Iterator[None]:
        """Inside, a forward's recomputed blocks keep their inputs only."""
        for block in self.recomputed:
            block.around = around
        try:
            yield
        finally:
            for block in self.recomputed:
                block.around = None

    @contextmanager
    def spare_buffers(self) -> Iterator[None]:
        """Inside, the layers work on copies of their buffers: running means are not updated a second time."""
        kept = [
            (module, name, buffer) for module in self.layers.modules() for name, buffer in _buffers(module)
        ]
        for module, name, buffer in kept:
            module._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for module, name, buffer in kept:
                module._buffers[name] = buffer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters by the model's own names."""
        for prefix, layer in zip(self.names, self.layers, strict=True):
            yield from layer.named_parameters(prefix)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by the model's own names, on the CPU."""
        found: dict[str, Tensor] = {}
        for name, layer in zip(self.names, self.layers, strict=True):
            for key, value in layer.state_dict(prefix=prefix_of(name)).items():
                found[key] = value.detach().cpu() if isinstance(value, Tensor) else value
        return found


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A tensor, or what holds tensors, with whatever is of floating point in this dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    leaves, shape = flatten(value)
    return rebuild(shape, [cast(leaf, dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def call(layer: nn.Module, value: Any, *, first: bool) -> Any:
    """Call a layer: the model's first with its inputs by position or name, another with what the one before gave."""
    if first and isinstance(value, dict):
        return layer(**value)
    if first and isinstance(value, tuple):
        return layer(*value)
    return layer(value)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]

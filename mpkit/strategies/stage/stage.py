"""Stage: a contiguous part of the model, its forward and its backward for one micro-batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.strategies.data.microbatch import Value, map_tensors
from mpkit.strategies.models.blocks import repeated_blocks
from mpkit.strategies.models.chain import prefix_of
from mpkit.strategies.models.nested import flatten, rebuild
from mpkit.strategies.models.randomness import Draws, may_draw
from mpkit.strategies.stage.block_recompute import Around, RecomputedBlock
from mpkit.strategies.stage.shard import Sharded

__all__ = ["PRECISIONS", "Stage", "call", "cast"]

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of plans that do not compute in the model's own precision."""


class Stage:
    """Some layers of a chain, on a device.

    Attributes:
        number: the stage's number.
        layers: the layers, in order, by name.
        names: the layers' names in the model.
        sharded: which of its parameters are shards of the model's.
        blocks: the model's repeated blocks, in this stage or not.
        recomputed: blocks of this stage that are recomputed in the backward.
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
        spans: Sequence[tuple[str, ...]] | None = None,
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
        self._spans = [()] * len(layers) if spans is None else spans

    def __call__(self, inputs: Value, draws: Draws) -> Any:
        """Return the output for the stage's input: in stage 0 the model's arguments, else the previous output.

        The input is not changed, even where a layer works in place: backward or recomputation need it.

        Args:
            inputs: the stage's input.
            draws: the random numbers for its layers.
        """
        if self._in_place:
            inputs = map_tensors(torch.clone, inputs)
        value: Any = inputs
        for i, layer in enumerate(self.layers):
            if self._draws[i]:
                draws.begin(self.names[i], self._spans[i])
            value = call(layer, value, first=i == 0 and self.number == 0)
        return value

    @contextmanager
    def recompute_blocks(self, around: Around) -> Iterator[None]:
        """Let recomputed blocks keep only their inputs, for forwards inside the block."""
        for block in self.recomputed:
            block.around = around
        try:
            yield
        finally:
            for block in self.recomputed:
                block.around = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stage's parameters by the model's own names."""
        for prefix, layer in zip(self.names, self.layers, strict=True):
            yield from layer.named_parameters(prefix)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers by the model's own names, on the CPU."""
        return {
            name: value.detach().cpu() if isinstance(value, Tensor) else value
            for name, value in self.live_state().items()
        }

    def live_state(self) -> dict[str, Any]:
        """Return the parameters and buffers themselves, by the model's own names; a module's extra state as it is."""
        state: dict[str, Any] = {}
        for name, layer in zip(self.names, self.layers, strict=True):
            state |= layer.state_dict(prefix=prefix_of(name), keep_vars=True)
        return state


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor, or the tensors that a value holds, to the dtype where they are of floating point."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    leaves, shape = flatten(value)
    return rebuild(shape, [cast(leaf, dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def call(layer: nn.Module, value: Any, *, first: bool) -> Any:
    """Call a layer: the model's first with its inputs by position or name, any other with the previous output."""
    if first and isinstance(value, dict):
        return layer(**value)
    if first and isinstance(value, tuple):
        return layer(*value)
    return layer(value)

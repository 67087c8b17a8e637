"""Stage: a contiguous part of the model on a device; how a layer is called, and what is copied to the device for it."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.strategies.data.microbatch import Value, leaves, map_tensors
from mpkit.strategies.models.chain import prefix_of, repeated_blocks
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.models.randomness import Draws, may_draw
from mpkit.strategies.stage.recompute import RecomputedBlock, RecomputeScope
from mpkit.strategies.stage.shard import ShardedModel
from mpkit.trace import Kind
from mpkit.trace.record.recorder import Recorder

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of plans that do not compute in the model's own precision."""


class Stage:
    """Some layers of a chain, on a device; `in_place` if one writes into its inputs.

    `blocks` are the model's repeated blocks, in this stage or not, and `spans` those in which each layer begins.
    """

    def __init__(
        self, number: int, layers: list[tuple[str, nn.Module]], device: torch.device, *, in_place: bool = False,
        sharded: ShardedModel | None = None, blocks: Collection[nn.Module] | None = None,
        spans: Sequence[tuple[str, ...]] | None = None,
    ) -> None:  # fmt: skip
        self.number = number
        self.sharded = sharded or ShardedModel()
        self.names = [name for name, _ in layers]
        # An nn.Module allows no dots in a name, and no empty one.
        named = OrderedDict((name.replace(".", "/") or "model", layer) for name, layer in layers)
        self.layers = nn.Sequential(named).to(device)
        self.blocks = set(repeated_blocks(self.layers).values() if blocks is None else blocks)
        self.recomputed: list[RecomputedBlock] = []
        self.in_place = in_place
        self._draws = [may_draw(layer) for layer in self.layers]
        self._spans = [()] * len(layers) if spans is None else spans

    def seeded_layers(self, draws: Draws) -> Iterator[nn.Module]:
        """Yield the layers in order, each with its random numbers seeded."""
        for i, layer in enumerate(self.layers):
            if self._draws[i]:
                draws.begin(self.names[i], self._spans[i])
            yield layer

    @contextmanager
    def recompute_blocks(self, scope: RecomputeScope) -> Iterator[None]:
        """Let the stage's recomputed blocks keep only their inputs, inside the `with` block."""
        for block in self.recomputed:
            block.scope = scope
        try:
            yield
        finally:
            for block in self.recomputed:
                block.scope = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stage's parameters by the model's own names."""
        for prefix, layer in zip(self.names, self.layers, strict=True):
            yield from layer.named_parameters(prefix)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers by the model's own names, on the CPU."""
        live = self.live_state().items()
        return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in live}

    def live_state(self) -> dict[str, Any]:
        """Return the parameters and buffers themselves, by the model's own names; a module's extra state as it is."""
        state: dict[str, Any] = {}
        for name, layer in zip(self.names, self.layers, strict=True):
            state |= layer.state_dict(prefix=prefix_of(name), keep_vars=True)
        return state


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor, or the tensors inside a value, to the dtype if they are of floating point."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    flat, shape = flatten(value)
    return rebuild(shape, [cast(leaf, dtype) if isinstance(leaf, Tensor) else leaf for leaf in flat])


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's floating-point parameters and buffers to 16 bits.

    Complex ones stay, as in `nn.Module.half`; `nn.Module.to` would drop their imaginary parts.
    """
    module.half() if dtype == torch.float16 else module.bfloat16()


def call(layer: nn.Module, value: Any, *, first: bool) -> Any:
    """Call a layer: the first one with the model's inputs by position or name, others with the previous output."""
    args, kwargs = arguments_of(value, first=first)
    return layer(*args, **kwargs)


def arguments_of(value: Any, *, first: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a layer is called with, by position and by name.

    >>> arguments_of({"tokens": 1}, first=True), arguments_of((1, 2), first=True), arguments_of((1, 2), first=False)
    (((), {'tokens': 1}), ((1, 2), {}), (((1, 2),), {}))
    """
    if first and isinstance(value, dict):
        return (), value
    return (value if first and isinstance(value, tuple) else (value,)), {}


def onto_device(value: Value, device: torch.device, record: Recorder) -> Value:
    """Return a copy on the device that a layer may write into; record it, and count it as activations."""
    copies = device.type != "cpu"
    nbytes = sum(tensor.nbytes for tensor in leaves(value))
    op = record.begin(Kind.COPY_TO_DEVICE, nbytes=nbytes) if copies else -1
    copied = map_tensors(lambda t: t.to(device, copy=True), value)
    if copies:
        record.end(op)
    track(leaves(copied), record)
    return copied


def track(tensors: Iterable[Tensor], record: Recorder) -> None:
    """Count the tensors as activations, for as long as they live."""
    for tensor in tensors:
        record.ledger.track(tensor, "activations")

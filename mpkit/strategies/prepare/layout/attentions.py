"""Keys and values of a model's attentions, which circulate in the ring of context parallelism.

One sample goes through the whole model, on fake tensors if possible and otherwise for real. For each call of
scaled_dot_product_attention the size of its keys and values and the calling module are recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mpkit.common.caught import fakes_or_real
from mpkit.strategies.context.checks import without_content
from mpkit.strategies.data.microbatch import Value, map_tensors, part
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.prepare.dry_run.quiet import quiet
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.fake_mode import FakeMode

__all__ = ["keys_and_values"]


def keys_and_values(model: nn.Module, inputs: Value, held: Sequence[Sequence[str]]) -> list[int]:
    """Return the number of elements of one sample's keys and values, in all attentions of each stage.

    >>> from mpkit.strategies.models.gpt import GPT
    >>> model = GPT(layers=3, width=8, heads=2)
    >>> stages = [["block0.norm1.weight"], ["block1.norm1.weight", "block2.norm1.weight"]]
    >>> keys_and_values(model, torch.zeros(2, 5, dtype=torch.long), stages)  # 2 b s h = 2 x 1 x 5 x 8 a layer
    [80, 160]

    Args:
        model: the whole model, on the CPU; it is not changed.
        inputs: a batch.
        held: the names of each stage's parameters.
    """
    sample = part(inputs, slice(0, 1))

    def on_fakes() -> list[tuple[str, int]]:
        with FakeMode() as mode:
            return _walk(without_content(model, mode), map_tensors(mode.from_tensor, sample))

    sums = [0] * len(held)
    with quiet():  # on real tensors, dropout would advance the caller's random state
        attentions = fakes_or_real(
            on_fakes, lambda: _walk(copy.deepcopy(model), sample), f"A sample of {type(model).__name__}"
        )
    for module, size in attentions:
        sums[_stage_of(module, held)] += size
    return sums


def _walk(model: nn.Module, sample: Value) -> list[tuple[str, int]]:
    """Return the calling module of each attention and the size of its keys and values."""
    inside: list[str] = []

    def begin(name: str) -> Callable[..., None]:
        return lambda *_: inside.append(name)

    def end(*_: Any) -> None:
        inside.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(begin(name))
        module.register_forward_hook(end)
    value: Any = sample
    attentions = _Attentions(inside)
    with torch.no_grad(), attentions:
        for i, (_, layer) in enumerate(layers_of(model)):
            value = call(layer, value, first=i == 0)
    return attentions.found


class _Attentions(TorchFunctionMode):
    """A mode that records attentions.

    Attributes:
        found: for each attention its module and the size of its keys and values.
    """

    def __init__(self, inside: list[str]) -> None:
        super().__init__()
        self._inside = inside
        self.found: list[tuple[str, int]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle one call of a torch function."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            names = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            sizes = [tensor.numel() for name in ("key", "value") if isinstance(tensor := names[name], Tensor)]
            self.found.append((self._inside[-1] if self._inside else "", sum(sizes)))
        return func(*args, **kwargs)


def _stage_of(module: str, held: Sequence[Sequence[str]]) -> int:
    """Return the last stage that has a parameter of the module, or of the nearest enclosing one."""
    while module:
        stages = [i for i, names in enumerate(held) if any(name.startswith(f"{module}.") for name in names)]
        if stages:
            return stages[-1]
        module = module.rpartition(".")[0]
    return len(held) - 1

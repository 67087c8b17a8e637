"""The inputs and outputs of a model's attentions, which context parallelism sends.

One sample goes through the whole model, on fake tensors if possible and otherwise for real. For each call of
scaled_dot_product_attention the sizes of its tensors and the calling module are recorded: a ring passes on the keys and
values; Ulysses exchanges the queries and the output too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mpkit.common.exceptions import fakes_or_real
from mpkit.strategies.data.microbatch import Value, map_tensors, part
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.prepare.dry_run.copies import copy_model, without_content
from mpkit.strategies.prepare.dry_run.isolation import quiet
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.fake_mode import FakeMode

__all__ = ["attention_sizes"]


def attention_sizes(
    model: nn.Module, inputs: Value, held: Sequence[Sequence[str]], ranks: int = 1
) -> tuple[list[int], list[int]]:
    """Return the elements of one sample's keys and values, and of its queries and outputs, in the attentions by stage.

    >>> from mpkit.strategies.models.gpt import GPT
    >>> model = GPT(layers=3, width=8, heads=2)
    >>> stages = [["block0.norm1.weight"], ["block1.norm1.weight", "block2.norm1.weight"]]
    >>> attention_sizes(model, torch.zeros(2, 5, dtype=torch.long), stages)  # 2 b s h = 2 x 1 x 5 x 8 a layer, each
    ([80, 160], [80, 160])

    Args:
        model: the whole model, on the CPU; it is not changed.
        inputs: a batch.
        held: the names of each stage's parameters.
        ranks: those that divide the heads; if they are more than the heads of keys, each of these counts once per rank
            that it is sent to.
    """
    sample = part(inputs, slice(0, 1))

    def on_fakes() -> list[tuple[str, int, int]]:
        with FakeMode() as mode:
            return _walk(without_content(model, mode), map_tensors(mode.from_tensor, sample), ranks)

    keys, others = [0] * len(held), [0] * len(held)
    with quiet():  # on real tensors, dropout would advance the caller's random state
        attentions = fakes_or_real(
            on_fakes,
            lambda: _walk(copy_model(model), sample, ranks),
            f"A sample of {type(model).__name__}",
        )
    for module, size, other in attentions:
        keys[_stage_of(module, held)] += size
        others[_stage_of(module, held)] += other
    return keys, others


def _walk(model: nn.Module, sample: Value, ranks: int) -> list[tuple[str, int, int]]:
    """Return the calling module of each attention, and the sizes of its keys and values, and of queries and output."""
    inside: list[str] = []

    def begin(name: str) -> Callable[..., None]:
        return lambda *_: inside.append(name)

    def end(*_: Any) -> None:
        inside.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(begin(name))
        module.register_forward_hook(end)
    value: Any = sample
    attentions = _Attentions(inside, ranks)
    with torch.no_grad(), attentions:
        for i, (_, layer) in enumerate(layers_of(model)):
            value = call(layer, value, first=i == 0)
    return attentions.found


class _Attentions(TorchFunctionMode):
    """A mode that records attentions.

    Attributes:
        found: for each attention its module, and the sizes of its keys and values, and of its queries and output.
    """

    def __init__(self, inside: list[str], ranks: int) -> None:
        super().__init__()
        self._inside, self._ranks = inside, ranks
        self.found: list[tuple[str, int, int]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle one call of a torch function."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            output = func(*args, **kwargs)
            keys = given["key"].numel() + given["value"].numel()
            if given["key"].dim() == 4:
                heads = given["key"].shape[1]
                keys = keys // heads * max(heads, self._ranks)
            others = given["query"].numel() + output.numel()
            self.found.append((self._inside[-1] if self._inside else "", keys, others))
            return output
        return func(*args, **kwargs)


def _stage_of(module: str, held: Sequence[Sequence[str]]) -> int:
    """Return the last stage that has a parameter of the module, or of the nearest enclosing one."""
    while module:
        stages = [i for i, names in enumerate(held) if any(name.startswith(f"{module}.") for name in names)]
        if stages:
            return stages[-1]
        module = module.rpartition(".")[0]
    return len(held) - 1

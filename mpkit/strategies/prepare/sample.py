"""One sample in the whole model: what its attentions are given, and which rows its routers send to experts.

The sample goes through the model once, on fake tensors if possible and otherwise for real. Context parallelism sends
what attentions are given: a ring passes on the keys and values; Ulysses exchanges the queries and the output too.
Expert parallelism exchanges the rows of all choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mpkit.common.exceptions import fakes_or_real
from mpkit.strategies.data.microbatch import Value, map_tensors, part
from mpkit.strategies.experts.known_experts import chosen_experts, find_experts, number_of_experts
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.prepare.copies import copy_model, without_content
from mpkit.strategies.prepare.isolation import quiet
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.fake_mode import FakeMode

__all__ = ["Attention", "SampleSeen", "observe_sample"]


class Attention(NamedTuple):
    """A call of scaled_dot_product_attention.

    Attributes:
        module: the name of the module that makes it.
        keys: elements of keys and values.
        heads: heads of the keys; 0 if they are not [batch, heads, time, width].
        others: elements of queries and output.
    """

    module: str
    keys: int
    heads: int
    others: int


@dataclass
class SampleSeen:
    """What one sample makes of a model.

    Attributes:
        attentions: in the order of their calls.
        routed: by the name of a layer's experts, the rows that they compute, their width, and how many they are.
    """

    attentions: list[Attention] = field(default_factory=list)
    routed: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def attention_sizes(self, held: Sequence[Sequence[str]], ranks: int = 1) -> tuple[list[int], list[int]]:
        """Return, by stage, the elements of keys and values, and of queries and outputs.

        Args:
            held: the names of each stage's parameters.
            ranks: those that divide the heads; if they are more than the heads of keys, each of these counts once per
                rank that it is sent to.

        >>> from mpkit.strategies.models.gpt import GPT
        >>> seen = observe_sample(GPT(layers=3, width=8, heads=2), torch.zeros(2, 5, dtype=torch.long))
        >>> stages = [["block0.norm1.weight"], ["block1.norm1.weight", "block2.norm1.weight"]]
        >>> seen.attention_sizes(stages)  # 2 b s h = 2 x 1 x 5 x 8 a layer, each
        ([80, 160], [80, 160])
        """
        keys, others = [0] * len(held), [0] * len(held)
        for each in self.attentions:
            stage = _stage_of(each.module, held)
            keys[stage] += each.keys // each.heads * max(each.heads, ranks) if each.heads else each.keys
            others[stage] += each.others
        return keys, others

    def routed_sizes(self, held: Sequence[Sequence[str]]) -> tuple[list[int], list[int], list[int]]:
        """Return, by stage, the elements of the rows in all layers with experts, the numbers of rows, and of experts.

        >>> from mpkit.strategies.models.gpt import GPT
        >>> model = GPT(layers=2, width=8, heads=2, experts=4, top_k=2)
        >>> stages = [["block0.mlp.experts.up"], ["block1.mlp.experts.up"]]
        >>> seen = observe_sample(model, torch.zeros(2, 5, dtype=torch.long))
        >>> seen.routed_sizes(stages)  # s k h = 5 x 2 x 8 each
        ([80, 80], [10, 10], [4, 4])
        """
        elements, rows, experts = ([0] * len(held) for _ in range(3))
        for name, (choices, width, count) in self.routed.items():
            stage = _stage_of(name, held)
            elements[stage] += choices * width
            rows[stage] += choices
            experts[stage] += count
        return elements, rows, experts


def observe_sample(model: nn.Module, inputs: Value) -> SampleSeen:
    """Return what the first sample of a batch makes of the whole model, which is on the CPU and is not changed."""
    sample = part(inputs, slice(0, 1))

    def on_fakes() -> SampleSeen:
        with FakeMode() as mode:
            return _walk(without_content(model, mode), map_tensors(mode.from_tensor, sample))

    with quiet():  # on real tensors, dropout would advance the caller's random state
        return fakes_or_real(
            on_fakes, lambda: _walk(copy_model(model), sample), f"A sample of {type(model).__name__}"
        )


def _walk(model: nn.Module, sample: Value) -> SampleSeen:
    observer = _Observer()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(observer.enter, name))
        module.register_forward_hook(observer.leave)
    for name, module in find_experts(model).items():
        module.register_forward_pre_hook(partial(observer.route, name), with_kwargs=True)
    value: Any = sample
    with torch.no_grad(), observer:
        for i, (_, layer) in enumerate(layers_of(model)):
            value = call(layer, value, first=i == 0)
    return observer.seen


class _Observer(TorchFunctionMode):
    """Sees attentions as they are called, and by hooks in which module, and what experts are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SampleSeen()
        self._inside = [""]

    def enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def leave(self, *_: Any) -> None:
        self._inside.pop()

    def route(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        before = self.seen.routed.get(name, (0, 0, 0))[0]
        rows = before + chosen_experts(args, kwargs).numel()
        self.seen.routed[name] = rows, x.shape[-1], number_of_experts(module)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function; note an attention."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            query, key, value = given["query"], given["key"], given["value"]
            heads = key.shape[1] if key.dim() == 4 else 0
            sizes = key.numel() + value.numel(), heads, query.numel() + output.numel()
            self.seen.attentions.append(Attention(self._inside[-1], *sizes))
        return output


def _stage_of(module: str, held: Sequence[Sequence[str]]) -> int:
    """Return the last stage that has a parameter of the module, or of the nearest enclosing one."""
    while module:
        stages = [i for i, names in enumerate(held) if any(name.startswith(f"{module}.") for name in names)]
        if stages:
            return stages[-1]
        module = module.rpartition(".")[0]
    return len(held) - 1

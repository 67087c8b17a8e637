"""The rows that a model's routers send to experts, which expert parallelism exchanges, and what ranks tell each other
about them where routing depends on the whole batch.

One sample goes through the whole model, on fake tensors if possible and otherwise for real.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from mpkit.common.exceptions import fakes_or_real
from mpkit.strategies.data.microbatch import Value, map_tensors, part
from mpkit.strategies.experts.known_experts import (
    chosen_experts,
    find_balanced,
    find_experts,
    number_of_experts,
)
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.prepare.dry_run.copies import without_content
from mpkit.strategies.prepare.dry_run.isolation import quiet
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.fake_mode import FakeMode

__all__ = ["routed_rows", "routing_bytes"]


def routed_rows(
    model: nn.Module, inputs: Value, held: Sequence[Sequence[str]]
) -> tuple[list[int], list[int], list[int]]:
    """Return, by stage, the elements of the rows of one sample in all layers with experts, and the numbers of rows and
    of experts.

    >>> from mpkit.strategies.models.gpt import GPT
    >>> model = GPT(layers=2, width=8, heads=2, experts=4, top_k=2)
    >>> stages = [["block0.mlp.experts.up"], ["block1.mlp.experts.up"]]
    >>> routed_rows(model, torch.zeros(2, 5, dtype=torch.long), stages)  # s k h = 5 x 2 x 8 each
    ([80, 80], [10, 10], [4, 4])

    Args:
        model: the whole model, on the CPU; it is not changed.
        inputs: a batch, of which the first sample is used.
        held: the parameters that each stage computes with.
    """
    sample = part(inputs, slice(0, 1))

    def on_fakes() -> dict[str, tuple[int, int]]:
        with FakeMode() as mode:
            return _walk(without_content(model, mode), map_tensors(mode.from_tensor, sample))

    with quiet():  # on real tensors, dropout would advance the caller's random state
        sizes = fakes_or_real(
            on_fakes, lambda: _walk(copy.deepcopy(model), sample), f"A sample of {type(model).__name__}"
        )
    modules = find_experts(model)
    elements, rows, experts = ([0] * len(held) for _ in range(3))
    for name, (choices, width) in sizes.items():
        stage = next(i for i, names in enumerate(held) if any(n.startswith(f"{name}.") for n in names))
        elements[stage] += choices * width
        rows[stage] += choices
        experts[stage] += number_of_experts(modules[name])
    return elements, rows, experts


def _walk(model: nn.Module, sample: Value) -> dict[str, tuple[int, int]]:
    """Return the rows that each layer's experts compute, and their width."""
    sizes: dict[str, tuple[int, int]] = {}

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        before = sizes.get(name, (0, 0))[0]
        sizes[name] = before + chosen_experts(args, kwargs).numel(), x.shape[-1]

    for name, module in find_experts(model).items():
        module.register_forward_pre_hook(partial(note, name), with_kwargs=True)
    value: Any = sample
    with torch.no_grad():
        for i, (_, layer) in enumerate(layers_of(model)):
            value = call(layer, value, first=i == 0)
    return sizes


def routing_bytes(model: nn.Module, resolved: ResolvedPlan) -> dict[str, list[float]]:
    """Return, by stage, the bytes that routing reduces in a step, where it depends on the whole batch.

    Args:
        model: the whole model.
        resolved: the plan, resolved for it.
    """
    plan, layers = resolved.plan, find_balanced(model)
    if not layers or plan.dp * plan.cp * (plan.tp if plan.sequence_parallel else 1) == 1:
        return {}
    reduced = [0.0] * len(resolved.held)
    for name, layer in layers.items():
        stage = next(
            i
            for i, names in enumerate(resolved.held)
            if any(n.startswith(f"{name}." if name else "") for n in names)
        )
        reduced[stage] += 8.0 * layer.experts_in_all * (bool(layer.aux_loss) + bool(layer.bias_rate))
    return {"routing_reduced": reduced}

"""The rows that a model's routers send to experts, which expert parallelism exchanges, and what ranks tell each other
about them where routing depends on the whole batch.

One sample goes through the whole model, on fake tensors if possible and otherwise for real.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from mpkit.common.exceptions import fakes_or_real
from mpkit.strategies.comm.process_group import FakeGroup
from mpkit.strategies.context.sequence import pieces
from mpkit.strategies.data.microbatch import Value, map_tensors, part, split
from mpkit.strategies.experts.copies import ExpertCopies
from mpkit.strategies.experts.known_experts import (
    chosen_experts,
    find_balanced,
    find_experts,
    number_of_experts,
)
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.models.experts import order_of_experts, placed_copies
from mpkit.strategies.prepare.dry_run.copies import without_content
from mpkit.strategies.prepare.dry_run.isolation import quiet
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.fake_mode import FakeMode

__all__ = ["copied_numbers", "routed_rows", "routing_bytes"]


def routed_rows(
    model: nn.Module, inputs: Value, held: Sequence[Sequence[str]]
) -> tuple[list[int], list[int], list[int]]:
    """Return, by stage, the elements of the rows of one sample in all layers with experts, and the numbers of rows and
    of experts, of which one with copies counts once for each.

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
    elements, rows, slots = ([0] * len(held) for _ in range(3))
    for name, (choices, width) in sizes.items():
        stage = next(i for i, names in enumerate(held) if any(n.startswith(f"{name}.") for n in names))
        elements[stage] += choices * width
        rows[stage] += choices
        slots[stage] += len(order_of_experts(modules[name], number_of_experts(modules[name])))
    return elements, rows, slots


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


def copied_numbers(model: nn.Module, resolved: ResolvedPlan, size: int) -> dict[str, list[float]]:
    """Return, by rank, the bytes of copies of experts that it sends in a step, and the elements of such experts.

    An owner sends weights, and a borrower gradients. Frozen experts are sent once.

    Args:
        model: the whole model.
        resolved: the plan, resolved for it.
        size: the bytes of an element.
    """
    plan, layers = resolved.plan, find_experts(model)
    copied = {name: layers[name] for name in placed_copies(model) if name in layers} if plan.ep > 1 else {}
    if not copied:
        return {}
    sent, elements = [0.0] * plan.ranks, [0.0] * plan.ranks
    for rank in range(plan.ranks):
        shards = resolved.sharded[plan.mesh.place(rank).tp % len(resolved.sharded)].shards
        held = {
            name
            for stage in resolved.schedule.stages_of(plan.mesh.place(rank).pp)
            for name in resolved.held[stage]
        }
        group = FakeGroup(plan.ep, plan.mesh.group(rank, "ep").index(rank))
        for name, module in copied.items():
            experts = number_of_experts(module)
            copies = ExpertCopies(module, order_of_experts(module, experts), experts, group)
            names = [n for n, p in module.named_parameters(name) if n in held and p.requires_grad]
            of_each = sum(prod(shards[n].shape[1:]) for n in names)
            sent[rank] += size * of_each * (copies.lent + copies.count)
            elements[rank] += of_each * experts / plan.ep
    return {"copies_bytes": sent, "copied_params": elements}


def routing_bytes(model: nn.Module, resolved: ResolvedPlan, size: int) -> dict[str, list[float]]:
    """Return, by stage, the bytes that routing reduces and gathers in a step, where it depends on the whole batch.

    Args:
        model: the whole model.
        resolved: the plan, resolved for it.
        size: the number of samples of a batch.
    """
    plan, layers = resolved.plan, find_balanced(model)
    t = plan.tp if plan.sequence_parallel else 1
    if not layers or plan.dp * plan.cp * t == 1:
        return {}
    stretches = plan.cp * t * len(pieces(0, plan.cp, plan.cp_order))
    samples = sum(
        plan.dp * -(-(end - start) // plan.dp) for start, end in split(size, min(plan.microbatches, size))
    )
    reduced, gathered = [0.0] * len(resolved.held), [0.0] * len(resolved.held)
    for name, layer in layers.items():
        stage = next(
            i
            for i, names in enumerate(resolved.held)
            if any(n.startswith(f"{name}." if name else "") for n in names)
        )
        numbers = 8.0 * layer.experts_in_all
        reduced[stage] += numbers * (bool(layer.aux_loss) + bool(layer.bias_rate))
        gathered[stage] += numbers * samples * stretches * (layer.capacity is not None)
    return {"routing_reduced": reduced, "routing_gathered": gathered}

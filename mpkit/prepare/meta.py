"""What a trace tells of the run that left it: the plan, who has what, and the sizes that formulas are about."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from mpkit.models.chain import layers_of
from mpkit.parallel.job import LocalNumbers
from mpkit.parallel.microbatch import Value, leaves, part, share, split
from mpkit.parallel.stage import PRECISIONS
from mpkit.plan import Plan
from mpkit.prepare.laid_out import LaidOut
from mpkit.schedule import build

__all__ = ["meta_of"]


def meta_of(model: nn.Module, plan: Plan, batch: tuple[Value, Value], laid: LaidOut) -> dict[str, Any]:
    """Of JSON types.

    Returns:
        plan: as JSON; stages: by stage, names of layers; parameters: of the model; dtype: that is computed in;
        replicas: the ranks of each, which all know its share of the loss (under DP rank 0 knows all of it);
        mesh: what `mpkit.formulas` asks for, of the largest micro-batch; shards: how parameters are divided, in words.
    """
    parameters = list(model.parameters())
    dtype = PRECISIONS.get(plan.precision, parameters[0].dtype if parameters else torch.float32)
    alone = plan.data_parallel == "dp"
    held = _held(model, laid)
    return {
        "plan": plan.to_json(),
        "stages": laid.placed,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtype": str(dtype).removeprefix("torch."),
        "replicas": [tuple(range(plan.ranks))] if alone else plan.mesh.groups("pp", "tp"),
        "mesh": {
            "local_params": _local_params(model, plan, laid, held),
            "element_bytes": dtype.itemsize,
            "layers_tp": _regions(laid, held),
            "embeddings_tp": _among(laid.sharded[0].plan.embeddings, held),
            "heads_tp": _among([head] if (head := laid.sharded[0].plan.head) else [], held),
            "stream_bytes": _stream(model, plan, batch, laid) * dtype.itemsize,
        },
        "shards": _shards(laid),
    }


def _held(model: nn.Module, laid: LaidOut) -> list[list[str]]:
    """By stage, the names of the parameters that it computes with."""
    opened = laid.by_place[0].opened
    if opened is not None:
        return [list(names) for names in opened.held]
    layers = layers_of(model)
    return [
        [name for i in stage for name, _ in layers[i][1].named_parameters(layers[i][0])]
        for stage in laid.stages
    ]


def _local_params(model: nn.Module, plan: Plan, laid: LaidOut, held: list[list[str]]) -> list[int]:
    """By rank, the elements of trained parameters that it would have if nothing of them were sharded by ZeRO."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    schedule, found = build(plan), []
    for rank in range(plan.ranks):
        place = plan.mesh.place(rank)
        shards = laid.sharded[place.tp % len(laid.sharded)].shards
        mine = {name: whole[name] for s in schedule.stages_of(place.pp) for name in held[s]}
        once = {id(p): (name, p) for name, p in mine.items() if p.requires_grad}
        found.append(sum(prod(shards[n].shape) if n in shards else p.numel() for n, p in once.values()))
    return found


def _regions(laid: LaidOut, held: list[list[str]]) -> list[int]:
    """By stage, how many regions with f and g it has; one that is gathered at its end has half of both."""
    regions = [region for region in laid.sharded[0].plan.regions if region.row is not None]
    return [sum(any(n.startswith(f"{r.row}.") for n in names) for r in regions) for names in held]


def _among(modules: Sequence[str], held: list[list[str]]) -> list[int]:
    """By stage, how many of these modules it has."""
    return [sum(any(n.startswith(f"{module}.") for n in names) for module in modules) for names in held]


def _stream(model: nn.Module, plan: Plan, batch: tuple[Value, Value], laid: LaidOut) -> int:
    """Elements of what goes from layer to layer (b s h), of one replica's largest micro-batch; 0 if nobody asks."""
    (start, end), *_ = split(int(leaves(batch[0])[0].shape[0]), plan.microbatches)
    inputs = part(batch[0], share(start, end, 0, plan.dp))
    regions = [region for region in laid.sharded[0].plan.regions if region.row is not None]
    if regions:
        weight = f"{regions[0].row}.weight"
        shard = laid.sharded[0].shards[weight]
        first = leaves(inputs)[0]
        tokens = prod(first.shape[:-1]) if first.is_floating_point() else first.numel()
        return tokens * shard.whole[1 - shard.dim]
    return _boundary(plan, laid.by_place[0], laid.stages) if plan.pp > 1 else 0


def _boundary(plan: Plan, local: LocalNumbers, stages: list[range]) -> int:
    """Elements that go from stage 0 to the next."""
    key = next(iter(local.numbers))
    if local.opened is not None:
        routes = [route for route in local.opened.divisions[key].routes if route.source == 0]
        return plan.cp * sum(prod(spec.shape) for route in routes[:1] for spec in route.specs)
    output = local.numbers[key][stages[0].stop - 1].output
    return plan.cp * sum(prod(spec.shape) for spec in output.specs) if output is not None else 0


def _shards(laid: LaidOut) -> dict[str, str]:
    """How each divided parameter is: of which dimension tensor-parallel ranks have parts."""
    words = {0: "rows", 1: "columns"}
    return {
        name: f"{len(shard.ranges[0]) * len(shard.ranges)} of {shard.whole[shard.dim]} {words[shard.dim]}"
        for name, shard in laid.sharded[0].shards.items()
    }

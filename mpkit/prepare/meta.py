"""What a trace tells of the run that left it: the plan, who has what, and the sizes that formulas are about."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from mpkit.models.chain import layers_of
from mpkit.parallel.job import LocalNumbers
from mpkit.parallel.microbatch import Value, leaves, share, split
from mpkit.parallel.stage import PRECISIONS
from mpkit.plan import Plan
from mpkit.prepare.attentions import keys_and_values
from mpkit.prepare.laid_out import LaidOut
from mpkit.schedule import build

__all__ = ["held_by_stage", "meta_of"]


def meta_of(model: nn.Module, plan: Plan, batch: tuple[Value, Value], laid: LaidOut) -> dict[str, Any]:
    """Of JSON types.

    Returns:
        plan: as JSON; stages: by stage, names of layers; parameters: of the model; dtype: that is computed in;
        replicas: the ranks of each, which all know its share of the loss (under DP rank 0 knows all of it);
        mesh: what `mpkit.formulas` asks for, of micro-batches on average; shards: how parameters are divided, in words.
    """
    parameters = list(model.parameters())
    dtype = PRECISIONS.get(plan.precision, parameters[0].dtype if parameters else torch.float32)
    alone = plan.data_parallel == "dp"
    held = held_by_stage(model, laid)
    return {
        "plan": plan.to_json(),
        "stages": laid.placed,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtype": str(dtype).removeprefix("torch."),
        "replicas": [tuple(range(plan.ranks))] if alone else plan.mesh.groups("pp", "tp"),
        "mesh": {
            "local_params": _local_params(model, plan, laid, held),
            "element_bytes": dtype.itemsize,
            "layers_tp": _regions(model, laid, held),
            "embeddings_tp": _among(laid.sharded[0].plan.embeddings, held),
            "heads_tp": _among([head] if (head := laid.sharded[0].plan.head) else [], held),
            "stream_bytes": _stream(plan, batch, laid) * dtype.itemsize,
            "kv_bytes": _keys_and_values(model, plan, batch, held, dtype.itemsize),
            "loss_bytes": [sent * _evenly(plan, batch) for sent in laid.loss_sends],
            "partial_bytes": _partial(model, laid, held, max(4, dtype.itemsize)),
            "tied_bytes": _tied(model, plan, laid, dtype.itemsize),
            "split": _split(plan),
        },
        "shards": _shards(laid),
    }


def held_by_stage(model: nn.Module, laid: LaidOut) -> list[list[str]]:
    """By stage, the names of the parameters that it computes with."""
    opened = laid.by_place[0].opened
    if opened is not None:
        return [list(names) for names in opened.held]
    layers = layers_of(model)
    return [
        [
            name
            for i in stage
            for name, _ in layers[i][1].named_parameters(layers[i][0], remove_duplicate=False)
        ]
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


def _regions(model: nn.Module, laid: LaidOut, held: list[list[str]]) -> list[int]:
    """By stage, how many regions with f and g it has, of a transformer: all go from b s h to b s h.

    Of another model nothing: what its regions send is in no paper.
    """
    plan, shards = laid.sharded[0].plan, laid.sharded[0].shards
    pairs = [
        (shards[f"{r.row}.weight"], shards[f"{r.column[0]}.weight"])
        for r in plan.regions
        if f"{r.row}.weight" in shards and not r.inputs
    ]
    widths = {shard.whole[1 - shard.dim] for pair in pairs for shard in pair}
    begins = next(iter(dict(model.named_parameters())), "").rpartition(".")[0]
    if len(pairs) < len(plan.regions) or len(widths) != 1 or any(begins in r.column for r in plan.regions):
        return []
    return [sum(any(n.startswith(f"{r.row}.") for n in names) for r in plan.regions) for names in held]


def _among(modules: Sequence[str], held: list[list[str]]) -> list[int]:
    """By stage, how many of these modules it has."""
    return [sum(any(n.startswith(f"{module}.") for n in names) for module in modules) for names in held]


def _samples(plan: Plan, batch: tuple[Value, Value]) -> tuple[int, float]:
    """Of a micro-batch's share of one replica: of the largest, and on average."""
    parts = split(int(leaves(batch[0])[0].shape[0]), plan.microbatches)
    shares = [share(start, end, replica, plan.dp) for start, end in parts for replica in range(plan.dp)]
    sizes = [len(range(which.start, which.stop, which.step or 1)) for which in shares]
    return max(sizes), sum(sizes) / len(sizes)


def _evenly(plan: Plan, batch: tuple[Value, Value]) -> float:
    """The average micro-batch's share, in largest ones."""
    largest, average = _samples(plan, batch)
    return average / largest


def _stream(plan: Plan, batch: tuple[Value, Value], laid: LaidOut) -> float:
    """Elements of what goes from layer to layer (b s h) of one replica, all of the sequence; 0 if nobody asks."""
    shards = laid.sharded[0].shards
    rows = [f"{region.row}.weight" for region in laid.sharded[0].plan.regions]
    if row := next((name for name in rows if name in shards), None):
        shard = shards[row]
        first = leaves(batch[0])[0]
        tokens = prod(first.shape[1:-1]) if first.is_floating_point() else prod(first.shape[1:])
        return tokens * shard.whole[1 - shard.dim] * _samples(plan, batch)[1]
    if plan.pp == 1:
        return 0
    return _boundary(plan, laid.by_place[0], laid.stages) * _evenly(plan, batch)


def _boundary(plan: Plan, local: LocalNumbers, stages: list[range]) -> int:
    """Elements that go from stage 0 to the next, of the largest micro-batch."""
    key = next(iter(local.numbers))
    if local.opened is not None:
        routes = [route for route in local.opened.divisions[key].routes if route.source == 0]
        return plan.cp * sum(prod(spec.shape) for route in routes[:1] for spec in route.specs)
    output = local.numbers[key][stages[0].stop - 1].output
    return plan.cp * sum(prod(spec.shape) for spec in output.specs) if output is not None else 0


def _keys_and_values(
    model: nn.Module, plan: Plan, batch: tuple[Value, Value], held: list[list[str]], size: int
) -> list[float]:
    """By stage, bytes of a micro-batch's keys and values, all heads, all of the sequence; nothing without cp."""
    if plan.cp == 1:
        return []
    average = _samples(plan, batch)[1] * size
    return [elements * average for elements in keys_and_values(model, batch[0], held)]


def _partial(model: nn.Module, laid: LaidOut, held: list[list[str]], size: int) -> list[int]:
    """By stage, bytes of the gradients that tensor-parallel ranks have a part of the sum of."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    names = laid.sharded[0].partial
    return [
        size
        * sum(
            p.numel()
            for p in {id(whole[n]): whole[n] for n in stage if n in names}.values()
            if p.requires_grad
        )
        for stage in held
    ]


def _tied(model: nn.Module, plan: Plan, laid: LaidOut, size: int) -> list[float]:
    """By place along pp, bytes of tied weights that it sends a step: gradients to the owner, weights to borrowers."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    schedule, found = build(plan), [0.0] * plan.pp
    holders = {stage: place for place in range(plan.pp) for stage in schedule.stages_of(place)}
    for shared in laid.shared:
        name = next(iter(shared.names.values()))
        if name not in whole or not whole[name].requires_grad:
            continue
        each = whole[name].numel() * size / (plan.tp if name in laid.sharded[0].shards else 1)
        owner, *borrowers = dict.fromkeys(holders[stage] for stage in shared.names)
        found[owner] += each * len(borrowers)
        for place in borrowers:
            found[place] += each
    return found


def _split(plan: Plan) -> list[float]:
    """By place along pp, the share of its backwards that are done in two halves."""
    rows = [[action.kind for action in row] for row in build(plan).rows]
    return [row.count("W") / max(1, row.count("F")) for row in rows]


def _shards(laid: LaidOut) -> dict[str, str]:
    """How each divided parameter is: of which dimension tensor-parallel ranks have parts."""
    return {
        name: f"{len(shard.ranges[0]) * len(shard.ranges)} of {shard.whole[shard.dim]} "
        f"{'columns' if shard.along == 'columns' else 'rows'}"
        for name, shard in laid.sharded[0].shards.items()
    }

"""A trace's metadata about its run: the plan, which rank has what, and the sizes that formulas need."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from mpkit.plan.plan import Plan
from mpkit.strategies.data.microbatch import Value, batch_size, leaves, shares
from mpkit.strategies.job.resolved import ResolvedPlan
from mpkit.strategies.prepare.layout.attentions import attention_sizes
from mpkit.strategies.prepare.layout.routed import routed_rows
from mpkit.strategies.stage.stage import PRECISIONS

__all__ = ["meta_of"]


def meta_of(model: nn.Module, batch: tuple[Value, Value], resolved: ResolvedPlan) -> dict[str, Any]:
    """Return the metadata of a run, in JSON types.

    Returns:
        plan: the plan as JSON; stages: names of layers by stage; parameters: the model's number of parameters; dtype:
        the dtype of computation; replicas: the ranks of each replica, which all know its share of the loss (under DP
        rank 0 knows all of it); mesh: what `mpkit.timeline.formulas` needs, for the average micro-batch; shards: how
        parameters are divided, in words.
    """
    plan, held, parameters = resolved.plan, resolved.held, list(model.parameters())
    dtype = PRECISIONS.get(plan.precision, parameters[0].dtype if parameters else torch.float32)
    alone = plan.data_parallel == "dp"
    return {
        "plan": plan.to_json(),
        "stages": [list(names) for names in resolved.placed],
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtype": str(dtype).removeprefix("torch."),
        "replicas": [tuple(range(plan.ranks))] if alone else plan.mesh.groups("pp", "tp"),
        "mesh": {
            "local_params": list(resolved.parameters),
            "element_bytes": dtype.itemsize,
            "layers_tp": _regions(model, resolved, held),
            "embeddings_tp": _count_by_stage(resolved.sharded[0].plan.embeddings, held),
            "heads_tp": _count_by_stage([head] if (head := resolved.sharded[0].plan.head) else [], held),
            "stream_bytes": _stream(batch, resolved) * dtype.itemsize,
            **_attention_bytes(model, plan, batch, held, dtype.itemsize),
            "loss_bytes": [sent * _evenly(plan, batch) for sent in resolved.loss_sends],
            "partial_bytes": _partial(model, resolved, held, max(4, dtype.itemsize)),
            "tied_bytes": _tied_bytes(model, resolved, dtype.itemsize),
            "split": _split(resolved),
            **_expert_numbers(model, resolved, batch, dtype.itemsize),
        },
        "shards": _shards(resolved),
    }


def _regions(model: nn.Module, resolved: ResolvedPlan, held: Sequence[Sequence[str]]) -> list[int]:
    """Return, by stage, the number of a transformer's regions with f and g, all of which map b s h to b s h.

    For other models the list is empty: no paper gives a formula for what their regions send.
    """
    plan, shards = resolved.sharded[0].plan, resolved.sharded[0].shards
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


def _count_by_stage(modules: Sequence[str], held: Sequence[Sequence[str]]) -> list[int]:
    """Return, by stage, how many of these modules it has."""
    return [sum(any(n.startswith(f"{module}.") for n in names) for module in modules) for names in held]


def _samples(plan: Plan, batch: tuple[Value, Value]) -> tuple[int, float]:
    """Return the number of samples in one replica's share of a micro-batch: the largest, and on average."""
    size = batch_size(batch[0])
    taken = [which for replicas in shares(size, plan.microbatches, plan.dp) for which in replicas]
    sizes = [len(range(size)[which]) for which in taken]
    return max(sizes), sum(sizes) / len(sizes)


def _evenly(plan: Plan, batch: tuple[Value, Value]) -> float:
    """Return the size of the average share of a micro-batch relative to the largest share."""
    largest, average = _samples(plan, batch)
    return average / largest


def _stream(batch: tuple[Value, Value], resolved: ResolvedPlan) -> float:
    """Return the elements of one replica's activations between layers (b s h) for the whole sequence; 0 if unused."""
    plan, shards = resolved.plan, resolved.sharded[0].shards
    rows = [f"{region.row}.weight" for region in resolved.sharded[0].plan.regions]
    if row := next((name for name in rows if name in shards), None):
        shard = shards[row]
        first = leaves(batch[0])[0]
        tokens = prod(first.shape[1:-1]) if first.is_floating_point() else prod(first.shape[1:])
        return tokens * shard.whole[1 - shard.dim] * _samples(plan, batch)[1]
    if plan.pp == 1:
        return 0
    return _boundary(resolved) * _evenly(plan, batch)


def _boundary(resolved: ResolvedPlan) -> int:
    """Return the number of elements that stage 0 sends to the next stage for the largest micro-batch."""
    routes = resolved.outgoing_routes(next(iter(resolved.numbers)), 0)
    return resolved.plan.cp * sum(prod(spec.shape) for route in routes[:1] for spec in route.specs)


def _attention_bytes(
    model: nn.Module, plan: Plan, batch: tuple[Value, Value], held: Sequence[Sequence[str]], size: int
) -> dict[str, list[float]]:
    """Return, by stage, the bytes of a micro-batch's keys and values, and of queries and outputs, of whole sequences.

    The lists are empty without cp.
    """
    if plan.cp == 1:
        return {"kv_bytes": [], "qo_bytes": []}
    average = _samples(plan, batch)[1] * size
    sizes = attention_sizes(model, batch[0], held, plan.tp * plan.cp if plan.cp_method == "ulysses" else 1)
    return {
        name: [elements * average for elements in each]
        for name, each in zip(("kv_bytes", "qo_bytes"), sizes, strict=True)
    }


def _expert_numbers(
    model: nn.Module, resolved: ResolvedPlan, batch: tuple[Value, Value], size: int
) -> dict[str, Any]:
    """Return, by rank, the elements of its experts, and by stage the bytes of a micro-batch's all-to-alls.

    Bytes are those of whole sequences, once for rows, and once for their counts. Nothing without ep.
    """
    plan, held = resolved.plan, resolved.held
    if plan.ep == 1:
        return {}
    whole, names = dict(model.named_parameters(remove_duplicate=False)), resolved.sharded[0].experts
    trained = [{whole[n] for n in stage if n in names and whole[n].requires_grad} for stage in held]
    of_stages = [sum(parameter.numel() for parameter in each) for each in trained]
    by_place = [
        sum(of_stages[stage] for stage in resolved.schedule.stages_of(place)) for place in range(plan.pp)
    ]
    rows, experts = routed_rows(model, batch[0], held)
    average = _samples(plan, batch)[1] * size
    return {
        "expert_params": [by_place[plan.mesh.place(rank).pp] // plan.ep for rank in range(plan.ranks)],
        "rows_bytes": [elements * average for elements in rows],
        "counts_bytes": [8 * number for number in experts],
    }


def _partial(model: nn.Module, resolved: ResolvedPlan, held: Sequence[Sequence[str]], size: int) -> list[int]:
    """Return, by stage, the bytes of gradients of which each tensor-parallel rank has a partial sum."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    plan, names, experts = resolved.plan, resolved.sharded[0].partial, resolved.sharded[0].experts
    once = [{id(whole[n]): n for n in stage if n in names and whole[n].requires_grad} for stage in held]
    # ZeRO divides all gradients among as many ranks before this sum, those of experts too.
    parts = {n: plan.ep if n in experts and not plan.zero else 1 for n in names}
    return [size * sum(whole[n].numel() // parts[n] for n in stage.values()) for stage in once]


def _tied_bytes(model: nn.Module, resolved: ResolvedPlan, size: int) -> list[float]:
    """Return, by place along pp, the bytes of tied weights sent per step.

    Gradients go to the owner, and weights to the borrowers.
    """
    whole = dict(model.named_parameters(remove_duplicate=False))
    plan, schedule = resolved.plan, resolved.schedule
    sent = [0.0] * plan.pp
    holders = {stage: place for place in range(plan.pp) for stage in schedule.stages_of(place)}
    for shared in resolved.shared:
        name = next(iter(shared.names.values()))
        if name not in whole or not whole[name].requires_grad:
            continue
        each = whole[name].numel() * size / (plan.tp if name in resolved.sharded[0].shards else 1)
        owner, *borrowers = dict.fromkeys(holders[stage] for stage in shared.names)
        sent[owner] += each * len(borrowers)
        for place in borrowers:
            sent[place] += each
    return sent


def _split(resolved: ResolvedPlan) -> list[float]:
    """Return, by place along pp, the share of its backwards that are split in two."""
    rows = [[action.kind for action in row] for row in resolved.schedule.rows]
    return [row.count("W") / max(1, row.count("F")) for row in rows]


def _shards(resolved: ResolvedPlan) -> dict[str, str]:
    """Describe how each divided parameter is sharded: how many of its rows, columns or experts one rank has."""
    sharded = resolved.sharded[0]
    return {
        name: f"{len(shard.ranges[0]) * len(shard.ranges)} of {shard.whole[shard.dim]} "
        f"{'experts' if name in sharded.experts else 'columns' if shard.axis_name == 'columns' else 'rows'}"
        for name, shard in sharded.shards.items()
    }

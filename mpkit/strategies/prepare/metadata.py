"""A trace's metadata about its run: the plan, which rank has what, and the sizes that formulas need."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from mpkit.plan.schedule import Schedule
from mpkit.strategies.data.microbatch import Value, batch_size, leaves, shares
from mpkit.strategies.job.job import ResolvedPlan
from mpkit.strategies.prepare.sample import SampleSeen
from mpkit.strategies.stage.shard import ShardedModel
from mpkit.strategies.stage.stage import PRECISIONS


def describe_run(
    model: nn.Module, batch: tuple[Value, Value], resolved: ResolvedPlan, sample: SampleSeen, *,
    by_owner: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the metadata of a run, in JSON types.

    replicas: the ranks of each replica, which all know its share of the loss (under DP rank 0 knows all of it).
    mesh: what `mpkit.timeline.formulas` needs, for the average micro-batch.

    Args:
        batch: the first one.
        sample: what ranks exchange of one sample.
        by_owner: whether ZeRO-1 gives each parameter whole to one rank.
    """
    plan, held, parameters = resolved.plan, resolved.held, list(model.parameters())
    dtype = PRECISIONS.get(plan.precision, parameters[0].dtype if parameters else torch.float32)
    alone = plan.data_parallel == "dp"
    sharded, named = resolved.sharded[0], dict(model.named_parameters(remove_duplicate=False))
    size = batch_size(batch[0])
    split = shares(size, plan.microbatches, plan.dp)
    samples = [len(range(size)[which]) for each in split for which in each]
    average = sum(samples) / len(samples)
    evenly = average / max(samples)
    # ---- activations between layers, and the inputs and outputs of attentions, of the average micro-batch
    stream = _stream_of_sample(batch[0], sharded) * average
    if not stream and plan.pp > 1:
        routes = resolved.outgoing_routes(next(iter(resolved.numbers)), 0)  # of the largest micro-batch
        stream = plan.cp * sum(prod(spec.shape) for r in routes[:1] for spec in r.specs) * evenly
    attentions: tuple[list[int], list[int]] = ([], [])
    if plan.cp > 1:
        exchanging = plan.tp * plan.cp if plan.cp_method == "ulysses" else 1
        attentions = sample.attention_sizes(held, exchanging)
    kv_bytes, qo_bytes = ([n * average * dtype.itemsize for n in sizes] for sizes in attentions)
    tied_bytes, tied_params = _tied(named, resolved, dtype.itemsize)
    return {
        "plan": plan.to_json(),
        "stages": [list(names) for names in resolved.placed],
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtype": str(dtype).removeprefix("torch."),
        "replicas": [tuple(range(plan.ranks))] if alone else plan.mesh.groups("pp", "tp"),
        "mesh": {
            "local_params": list(resolved.parameters),
            "element_bytes": dtype.itemsize,
            "layers_tp": _regions(model, sharded, held),
            "embeddings_tp": _count_by_stage(sharded.plan.embeddings, held),
            "heads_tp": _count_by_stage([head] if (head := sharded.plan.head) else [], held),
            "stream_bytes": stream * dtype.itemsize,
            "kv_bytes": kv_bytes,
            "qo_bytes": qo_bytes,
            "loss_bytes": [sent * evenly for sent in resolved.loss_sends],
            "partial_bytes": _partial(named, resolved, held, max(4, dtype.itemsize)),
            "tied_bytes": tied_bytes,
            "tied_params": tied_params,
            "split": _split(resolved.schedule),
            "by_owner": by_owner,
            **_expert_numbers(named, resolved, sample, average, dtype.itemsize),
        },
    }


def _regions(model: nn.Module, sharded: ShardedModel, held: Sequence[Sequence[str]]) -> list[int]:
    """Return, by stage, the number of a transformer's regions with f and g, all of which map b s h to b s h.

    For other models the list is empty: no paper gives a formula for what their regions send.
    """
    shards, regions = sharded.shards, [r for r in sharded.plan.regions if r.row not in sharded.shards]
    pairs = [
        (shards[f"{r.row}.weight"], shards[f"{r.column[0]}.weight"])
        for r in regions
        if f"{r.row}.weight" in shards and not r.inputs
    ]
    widths = {shard.whole[1 - shard.dim] for pair in pairs for shard in pair}
    begins = next(iter(dict(model.named_parameters())), "").rpartition(".")[0]
    if len(pairs) < len(regions) or len(widths) != 1 or any(begins in r.column for r in regions):
        return []
    return [sum(any(n.startswith(f"{r.row}.") for n in names) for r in regions) for names in held]


def _count_by_stage(modules: Sequence[str], held: Sequence[Sequence[str]]) -> list[int]:
    return [sum(any(n.startswith(f"{module}.") for n in names) for module in modules) for names in held]


def _stream_of_sample(inputs: Value, sharded: ShardedModel) -> int:
    """Return the elements of one sample's activations between divided layers (s h), of the whole sequence."""
    rows = [f"{region.row}.weight" for region in sharded.plan.regions]
    row = next((name for name in rows if name in sharded.shards), None)
    if row is None:
        return 0
    shard, first = sharded.shards[row], leaves(inputs)[0]
    tokens = prod(first.shape[1:-1]) if first.is_floating_point() else prod(first.shape[1:])
    return tokens * shard.whole[1 - shard.dim]


def _expert_numbers(
    whole: Mapping[str, nn.Parameter], resolved: ResolvedPlan, sample: SampleSeen, samples: float, size: int
) -> dict[str, Any]:
    """Return what experts add to the formulas: nothing without ep, and without experts that tp divides.

    Along tp: by stage, the layers with such experts, and the choices of a micro-batch's tokens. Along ep: by rank, the
    elements of its experts, and by stage the bytes of a micro-batch's all-to-alls, of whole sequences: rows, counts.
    """
    plan, held, names = resolved.plan, resolved.held, resolved.sharded[0].experts
    shards, regions = resolved.sharded[0].shards, resolved.sharded[0].plan.regions
    divided = [sum(region.row in stage for region in regions if region.row in shards) for stage in held]
    if plan.ep == 1 and not any(divided):
        return {}
    rows, choices, slots = sample.routed_sizes(held)
    along_tp = {"experts_tp": divided, "choices": [n * samples for n in choices]} if any(divided) else {}
    if plan.ep == 1:
        return along_tp
    once = [{id(whole[n]): n for n in stage if n in names and whole[n].requires_grad} for stage in held]

    def elements_of(rank: int) -> int:
        parts = resolved.sharded[plan.mesh.place(rank).tp % len(resolved.sharded)].shards
        stages = resolved.schedule.stages_of(plan.mesh.place(rank).pp)
        return sum(prod(parts[n].shape) for stage in stages for n in once[stage].values())

    return along_tp | {
        "expert_params": list(map(elements_of, range(plan.ranks))),
        "rows_bytes": [elements * samples * size for elements in rows],
        "counts_bytes": [8 * number for number in slots],
    }


def _partial(
    whole: Mapping[str, nn.Parameter], resolved: ResolvedPlan, held: Sequence[Sequence[str]], size: int
) -> list[int]:
    """Return, by stage, the bytes of gradients of which each tensor-parallel rank has a partial sum."""
    plan, names, experts = resolved.plan, resolved.sharded[0].partial, resolved.sharded[0].experts
    once = [{id(whole[n]): n for n in stage if n in names and whole[n].requires_grad} for stage in held]
    # ZeRO divides all gradients among as many ranks before this sum, those of experts too.
    parts = {n: plan.ep if n in experts and not plan.zero else 1 for n in names}
    return [size * sum(whole[n].numel() // parts[n] for n in stage.values()) for stage in once]


def _tied(
    whole: Mapping[str, nn.Parameter], resolved: ResolvedPlan, size: int
) -> tuple[list[float], list[float]]:
    """Return, by place along pp, the bytes of tied weights sent per step, and the elements of those held there.

    Gradients go to the owner, and weights to the borrowers.
    """
    plan, schedule = resolved.plan, resolved.schedule
    sent, there = [0.0] * plan.pp, [0.0] * plan.pp
    holders = {stage: place for place in range(plan.pp) for stage in schedule.stages_of(place)}
    for shared in resolved.shared:
        name = next(iter(shared.names.values()))
        if name not in whole or not whole[name].requires_grad:
            continue
        each = whole[name].numel() / (plan.tp if name in resolved.sharded[0].shards else 1)
        owner, *borrowers = dict.fromkeys(holders[stage] for stage in shared.names)
        sent[owner] += each * size * len(borrowers)
        for place in borrowers:
            sent[place] += each * size
        for place in (owner, *borrowers):
            there[place] += each
    return sent, there


def _split(schedule: Schedule) -> list[float]:
    """Return, by place along pp, the share of its backwards that are split in two."""
    rows = [[action.kind for action in row] for row in schedule.rows]
    return [row.count("W") / max(1, row.count("F")) for row in rows]

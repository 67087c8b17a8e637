"""This rank's part of the model: its shard of each layer, its experts, and its part of each sequence.

    shard       tensor parallelism: parameters replaced by this rank's parts (`mpkit.strategies.tensor`)
    experts     expert parallelism: likewise, by expert (`mpkit.strategies.experts`)
    positions   context parallelism: the model is given the positions of its tokens (`mpkit.strategies.context`)

A rank does this with its process groups, and the parent's dry run does the same with fake ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from mpkit.plan.plan import Plan
from mpkit.plan.rules import call_of
from mpkit.plan.schedule.core import Schedule
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.context.divided_attention import ContextParallel
from mpkit.strategies.context.sequence import shift_positions
from mpkit.strategies.experts.divide import divide_experts, find_experts
from mpkit.strategies.models.own_draws import OwnDraws, TokenDraws
from mpkit.strategies.tensor import ShardedModel, shard_model

AttentionOver = Callable[..., AbstractContextManager[Any]]
"""Makes the context manager of a forward from what counts the pairs of a query and a key."""


def localize(
    model: nn.Module, plan: Plan, schedule: Schedule, group_of: Callable[[str], Communicator]
) -> ShardedModel:
    """Shard a model in place, and give it the positions of its tokens.

    Args:
        model: the whole model; its tensors are left as they are.
        plan: read for tensor, sequence_parallel and cp_order.
        schedule: whether it splits backwards; then tensor parallelism does not overlap.
        group_of: a function from an axis to this rank's process group along it.
    """
    tp, cp, ep = group_of("tp"), group_of("cp"), group_of("ep")
    # ---- shard
    layers = find_experts(model) if ep.size > 1 else {}
    whole = set(layers if plan.etp != plan.tp else ())
    sharded = shard_model(
        model,
        tp,
        plan.tensor,
        sequence=plan.sequence_parallel,
        overlap=not schedule.splits_backward,
        whole=whole,
    )
    # ---- experts
    experts = divide_experts(model, ep, sharded.shards)
    if plan.etp == plan.tp > 1 and (rest := [name for name in layers if name not in _owners(sharded.shards)]):
        raise ValueError(
            f"{plan!r} divides each expert along tp, and how {rest[0]} can be divided is not known: a Region of its "
            f"parameters in Plan(tensor=...) says it; or, with whole experts, {call_of(plan, {'etp': None})}"
        )
    along = dict.fromkeys(experts, "ep")
    shards = sharded.shards | experts
    # Where tp is folded, its ranks are replicas of experts, whose gradients are summed over these; with etp = tp each
    # rank has seen all tokens of its part.
    partial = sharded.partial - experts.keys() if plan.etp else sharded.partial
    sharded = replace(sharded, shards=shards, along=along, partial=partial)
    # ---- positions
    if cp.size > 1:
        shift_positions(model, cp, plan.cp_order)
        sharded.draws.around = (f"context on {cp.index}",)
    return sharded


def _owners(parameters: Iterable[str]) -> set[str]:
    """Return the names of the modules that have these parameters."""
    return {name.rpartition(".")[0] for name in parameters}


def attention_over(plan: Plan, group_of: Callable[[str], Communicator], draws: OwnDraws) -> AttentionOver:
    """Return the context manager for forwards where tokens are divided: attention is over whole sequences, and random
    numbers that are drawn for no token are the same on all ranks.
    """
    if plan.cp > 1:
        return partial(ContextParallel, group_of("cp"), plan.cp_order, draws, plan.cp_method == "ulysses")
    divided = plan.sequence_parallel and plan.tp > 1
    return lambda attended=None: TokenDraws(draws) if divided else nullcontext()

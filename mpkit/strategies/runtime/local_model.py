"""This rank's part of the model: its shard of each layer, its experts, and its part of each sequence.

    shard       tensor parallelism: parameters replaced by this rank's parts (`mpkit.strategies.tensor`)
    experts     expert parallelism: likewise, by expert (`mpkit.strategies.experts`)
    positions   context parallelism: the model is given the positions of its tokens (`mpkit.strategies.context`)

A rank does this with its process groups, and the parent's dry run does the same with fake ones.
"""

from collections.abc import Callable
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
    """Shard a model in place, though not its tensors, and give it the positions of its tokens.

    `group_of` returns this rank's process group along an axis. Tensor parallelism does not overlap if the schedule
    splits backwards.
    """
    tp, cp, ep = group_of("tp"), group_of("cp"), group_of("ep")
    # ---- shard
    layers = find_experts(model) if ep.size > 1 else {}
    whole, overlap = set(layers if plan.etp != plan.tp else ()), not schedule.splits_backward
    sequence = plan.sequence_parallel
    sharded = shard_model(model, tp, plan.tensor, sequence=sequence, overlap=overlap, whole=whole)
    # ---- experts
    experts = divide_experts(model, ep, sharded.shards)
    owners = {name.rpartition(".")[0] for name in sharded.shards}
    if plan.etp == plan.tp > 1 and (rest := [name for name in layers if name not in owners]):
        raise ValueError(
            f"{plan!r} divides each expert along tp, and how {rest[0]} can be divided is not known: a Region of its "
            f"parameters in Plan(tensor=...) says it; or, with whole experts, {call_of(plan, {'etp': None})}"
        )
    # Where tp is folded, its ranks are replicas of experts, whose gradients are summed over these; with etp = tp each
    # rank has seen all tokens of its part.
    partial = sharded.partial - experts.keys() if plan.etp else sharded.partial
    shards, along = sharded.shards | experts, dict.fromkeys(experts, "ep")
    sharded = replace(sharded, shards=shards, along=along, partial=partial)
    # ---- positions
    if cp.size > 1:
        shift_positions(model, cp, plan.cp_order)
        sharded.draws.around = (f"context on {cp.index}",)
    return sharded


def attention_over(plan: Plan, group_of: Callable[[str], Communicator], draws: OwnDraws) -> AttentionOver:
    """Return the context manager of forwards on divided tokens: attention over whole sequences, and the same random
    numbers on all ranks if they are drawn for no token.
    """
    if plan.cp > 1:
        return partial(ContextParallel, group_of("cp"), plan.cp_order, draws, plan.cp_method == "ulysses")
    divided = plan.sequence_parallel and plan.tp > 1
    return lambda attended=None: TokenDraws(draws) if divided else nullcontext()

"""This rank's part of the model: its shard of each layer, its experts, and its part of each sequence.

    shard       tensor parallelism: parameters replaced by this rank's parts (`mpkit.strategies.tensor`)
    experts     expert parallelism: likewise, by expert (`mpkit.strategies.experts`)
    positions   context parallelism: the model is given the positions of its tokens (`mpkit.strategies.context`)
    attention   the context manager of a forward, in which attention is over whole sequences

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
    sums = sharded.partial - experts.keys() if plan.etp else sharded.partial
    shards, along = sharded.shards | experts, dict.fromkeys(experts, "ep")
    sharded = replace(sharded, shards=shards, along=along, partial=sums)
    # ---- positions
    if cp.size > 1:
        shift_positions(model, cp, plan.cp_order)
        sharded.draws.around = (f"context on {cp.index}",)
    # ---- attention
    attention: Callable[..., AbstractContextManager[Any]] = nullcontext
    if cp.size > 1:
        attention = partial(ContextParallel, cp, plan.cp_order, sharded.draws, plan.cp_method == "ulysses")
    elif sequence and tp.size > 1:
        attention = partial(_draw_for_tokens, sharded.draws)
    return replace(sharded, attention=attention)


def _draw_for_tokens(draws: OwnDraws, attended: object = None) -> TokenDraws:
    """Return the context of a forward in which all ranks draw alike what is drawn for no token."""
    return TokenDraws(draws)

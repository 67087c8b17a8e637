"""Sharding of a model in place, for one rank of a tensor-parallel group.

    resolve     match the plan's patterns with the model's names
    shards      determine which part of which parameter is this rank's
    replace     replace each divided parameter by its part; names and modules stay
    work        set hooks and forwards: regions, embeddings, head, sequence

Nothing is sent: each rank starts from the whole model, and takes its part.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from mpkit.plan.tensor_plan import Region, TensorPlan
from mpkit.strategies.comm.process_group import ProcessGroup
from mpkit.strategies.models.own_draws import OwnDraws
from mpkit.strategies.stage.shard import ShardedModel, evenly
from mpkit.strategies.tensor.known_plans import find_tensor_plan
from mpkit.strategies.tensor.logits import DividedLogits
from mpkit.strategies.tensor.operators import gather_features
from mpkit.strategies.tensor.region import Finish, RegionAtWork
from mpkit.strategies.tensor.resolve import check
from mpkit.strategies.tensor.sequence import divide_sequence, modules_between
from mpkit.strategies.tensor.shards import Shards, localize, partial_sums, shards_of
from mpkit.strategies.tensor.vocabulary import divide_embedding

__all__ = ["ShardedModel", "shard_model"]


def shard_model(
    model: nn.Module,
    group: ProcessGroup,
    plan: TensorPlan | None = None,
    *,
    sequence: bool = False,
    overlap: bool = True,
    whole: Collection[str] = (),
) -> ShardedModel:
    """Shard a model in place for the rank at `group.index`, and let its forward work together with the other ranks'.

    >>> from mpkit.models import GPT
    >>> from mpkit.strategies.comm.process_group import FakeGroup
    >>> model = GPT(layers=1, width=8, heads=2)
    >>> sharded = shard_model(model, FakeGroup(2))
    >>> model.block0.attention.qkv.weight.shape, sharded.shards["block0.attention.qkv.weight"].ranges
    (torch.Size([12, 8]), (range(0, 4), range(8, 12), range(16, 20)))

    Args:
        model: the whole model; changed in place.
        group: the ranks, and this one's place among them.
        plan: what to divide; None for `find_tensor_plan(model)`.
        sequence: divide what is between regions by sequence, as the plan's `sequence` says.
        overlap: sum the gradients of a region's input while those of its weights are computed. False where a backward
            is split, which needs plain layers; with `sequence`, these keep their whole input for the backward, and not
            only this rank's part of it.
        whole: modules that the plan is not to divide.

    Raises:
        ValueError: as for `check`.
    """
    if group.size == 1:
        return ShardedModel()
    # ---- resolve
    plan = _leave_whole(find_tensor_plan(model) if plan is None else plan, set(whole))
    plan = _leave_whole(
        check(model, group.size, plan, sequence=sequence), set(whole)
    )  # now with the model's names
    # ---- shards
    shards = shards_of(model, group, plan)
    sums = partial_sums(model, plan, shards, sequence=sequence)
    # ---- replace
    modules = dict(model.named_modules())
    finishes = [_finishes(region, group, shards) for region in plan.regions]
    shards.replace()
    # ---- work
    draws = OwnDraws()
    on_parts = modules_between(model, *plan.sequence) if sequence and plan.sequence else set()
    for region, finish in zip(plan.regions, finishes, strict=True):
        localize(modules[region.entry], region, group)
        RegionAtWork(
            group, region.entry, modules[region.entry],
            {modules[name]: finish[name] for name in region.column if name in modules},
            None if region.row is None else modules.get(region.row), draws,
            sequence=region.entry in on_parts, overlap=overlap, region=region,
        )  # fmt: skip
    _divide_vocabulary(modules, group, plan, shards, overlap=overlap)
    if sequence and plan.sequence is not None:
        divide_sequence(model, group, draws, *plan.sequence)
    return ShardedModel(shards.found, sums, plan, draws)


def _leave_whole(plan: TensorPlan, whole: set[str]) -> TensorPlan:
    """Return the plan without what divides these modules."""
    return replace(
        plan,
        regions=tuple(r for r in plan.regions if not whole & {r.entry, *r.column, r.row}),
        embeddings=tuple(name for name in plan.embeddings if name not in whole),
        head=None if plan.head in whole else plan.head,
    )


def _finishes(region: Region, group: ProcessGroup, shards: Shards) -> dict[str, Finish]:
    """Return what is done with each column layer's outputs: they stay divided, or are gathered without a row layer."""
    if region.row is not None:
        return dict.fromkeys(region.column, _stay)
    finishes: dict[str, Finish] = {}
    for name in region.column:
        sizes = [len(part) for part in evenly(shards.widths(name)[1], group.size)]
        convolution = len(shards.of_weight(name).whole) > 2
        finishes[name] = partial(gather_features, group, sizes=sizes, dim=1 if convolution else -1)
    return finishes


def _stay(y: Tensor) -> Tensor:
    return y


def _divide_vocabulary(
    modules: dict[str, nn.Module], group: ProcessGroup, plan: TensorPlan, shards: Shards, *, overlap: bool
) -> None:
    """Divide the embeddings, and the head with its logits."""
    for name in plan.embeddings:
        embedding: Any = modules[name]
        shard = shards.of_weight(name)
        divide_embedding(group, embedding, shard.ranges[0], shard.whole[0])
    if plan.head is None:
        return
    head = modules[plan.head]
    shard = shards.of_weight(plan.head)
    vocabulary = tuple(evenly(shard.whole[shard.dim], group.size))
    logits = partial(DividedLogits.make, group, vocabulary)
    RegionAtWork(group, plan.head, head, {head: logits}, None, OwnDraws(), sequence=False, overlap=overlap)

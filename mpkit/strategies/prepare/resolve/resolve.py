"""Resolve a plan for a model and its batches, in one pass: `ResolvedPlan`, which everything after it reads.

    shapes        one micro-batch, or a replica's share of one, of every shape that the training will meet
    local         the model as a rank holds it: its shards of the layers, its part of each sequence (`localized`)
    dry run       what each layer makes of each shape, on fake tensors, and the FLOPs
    stages        where the model is cut; a model that is no chain is partitioned
    parameters    which stage computes with which, and how many elements each rank holds

Tensor-parallel ranks have shards. If t divides everything, all shards have the same shapes and one dry run serves all
ranks; otherwise each place along tp has its own dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.strategies.data.microbatch import Value, one_of_each_shape
from mpkit.strategies.job.resolved import LocalNumbers, ResolvedPlan
from mpkit.strategies.models.chain import is_chain, layers_of
from mpkit.strategies.partition.boundary import LayerNumbers, Shared
from mpkit.strategies.partition.graph import PartitionedModel
from mpkit.strategies.prepare.dry_run.dry_run import dry_run
from mpkit.strategies.prepare.partition import partition_for_draws, partition_model
from mpkit.strategies.prepare.resolve.local_copy import Localized, local_copy
from mpkit.strategies.prepare.resolve.stages import cut_stages, shared_weights
from mpkit.strategies.stage.shard import Sharded

__all__ = ["resolve"]

Loss = Callable[[Any, Any], Any]
Shapes = dict[Hashable, tuple[Value, Value]]
"""A micro-batch of every shape, by its signature."""
Names = tuple[tuple[str, ...], ...]
"""By stage."""


def resolve(
    model: nn.Module, sizes: list[tuple[Value, Value]], plan: Plan, loss: Loss, *, by_name: bool
) -> ResolvedPlan:
    """Return what a plan comes to for a model and the batches of a training.

    Args:
        model: the whole model, on the CPU; it is not changed.
        sizes: a batch of every size that occurs, the largest first.
        plan, loss: the plan and loss of the training.
        by_name: as in `prepare`.

    Raises:
        ValueError: model, data and plan do not fit together.
    """
    schedule = plan.build()
    # ---- shapes
    shapes = one_of_each_shape(sizes, plan.microbatches, plan.dp)
    # ---- local
    copies = _local_copies(model, plan, sizes[0])
    first = copies[0]
    # ---- dry run
    sends = _LossSends(loss, first)
    numbers = [_dry_run(each, shapes, plan, sends if each is first else loss) for each in copies]
    # ---- stages
    partitions = _partitions(model, copies, shapes, plan, loss, relays=not by_name)
    local = tuple(LocalNumbers(*each) for each in zip(numbers, partitions, strict=True))
    if partitions[0] is not None:
        stages, (placed, held, shared) = (range(1),) * plan.stages, _of_partition(partitions[0])
    else:
        stages, (placed, held, shared) = _of_chain(model, numbers[0], plan)
    # ---- parameters
    sharded = tuple(each.sharded for each in copies)
    parameters = _trained_by_rank(model, plan, schedule, held, sharded)
    for each in copies:
        _let_go(each)
    return ResolvedPlan(
        plan, schedule, stages, placed, held, shared, local, sharded, parameters, sends.most
    )  # fmt: skip


# ---- local ---------------------------------------------------------------------------------------------------


def _local_copies(model: nn.Module, plan: Plan, batch: tuple[Value, Value]) -> list[Localized]:
    """Return the model as the ranks along tp hold it; a single copy if all of them hold the same shapes."""
    first = local_copy(model, plan, batch)
    if plan.tp == 1:
        return [first]
    last = local_copy(model, plan, batch, plan.tp - 1)
    if _shapes(first) == _shapes(last):
        _let_go(last)
        return [first]
    return [first, *(local_copy(model, plan, batch, place) for place in range(1, plan.tp - 1)), last]


def _shapes(local: Localized) -> dict[str, tuple[int, ...]]:
    return {name: shard.shape for name, shard in local.sharded.shards.items()}


def _let_go(local: Localized) -> None:
    """Free the copy's shards, which would otherwise stay until Python collects reference cycles.

    All other tensors are the caller's.
    """
    for name in local.sharded.shards:
        local.model.get_parameter(name).data = torch.empty(0)


# ---- dry run -------------------------------------------------------------------------------------------------


class _LossSends:
    """A loss whose communication is counted: for vocab-parallel logits a few numbers per token, or an all-gather.

    Attributes:
        most: bytes reduced and gathered by the call with the most.
    """

    def __init__(self, loss: Loss, local: Localized) -> None:
        self._loss, self._tp = loss, local.tp
        self.most = (0, 0)

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the loss and count its communication."""
        before = self._tp.reduced, self._tp.gathered
        value = self._loss(outputs, targets)
        self.most = max(self.most, (self._tp.reduced - before[0], self._tp.gathered - before[1]), key=sum)
        return value


def _dry_run(local: Localized, shapes: Shapes, plan: Plan, loss: Loss) -> dict[Hashable, list[LayerNumbers]]:
    return dry_run(
        local.model, shapes, loss, counts=plan.stages == 1 or is_chain(local.model), precision=plan.precision,
        whole_statistics=plan.dp > 1 and plan.batchnorm == "sync", cut=local.cut, attention=local.attention,
    )  # fmt: skip


# ---- stages --------------------------------------------------------------------------------------------------


def _partitions(
    model: nn.Module, copies: list[Localized], shapes: Shapes, plan: Plan, loss: Loss, *, relays: bool
) -> list[PartitionedModel | None]:
    """Return, by place along tp, how a model that is no chain is divided; None for a chain."""
    if is_chain(model) or (plan.stages == 1 and (plan.ranks > 1 or plan.zero)):
        return [None] * len(copies)
    if plan.stages == 1:
        return [partition_for_draws(model, shapes, plan, loss)]
    partitions: list[PartitionedModel | None] = []
    for local in copies:
        partitions.append(
            partition_model(
                local.model,
                shapes,
                plan,
                loss,
                relays=relays,
                cut=local.cut,
                attention=local.attention,
                like=partitions[0] if partitions else None,
            )
        )
    return partitions


def _of_partition(partition: PartitionedModel) -> tuple[Names, Names, tuple[Shared, ...]]:
    """Return the blocks and the parameters of each stage, and the tied weights."""
    return tuple(partition.placed), tuple(partition.held), tuple(partition.shared_weights)


def _of_chain(
    model: nn.Module, numbers: dict[Hashable, list[LayerNumbers]], plan: Plan
) -> tuple[tuple[range, ...], tuple[Names, Names, tuple[Shared, ...]]]:
    """Cut a chain; return the layers of each stage by number, their names, the parameters, and the tied weights."""
    layers = layers_of(model)
    stages = cut_stages([name for name, _ in layers], next(iter(numbers.values()))[:-1], plan)
    placed = tuple(tuple(layers[i][0] for i in stage) for stage in stages)
    held = tuple(
        tuple(
            name
            for i in stage
            for name, _ in layers[i][1].named_parameters(layers[i][0], remove_duplicate=False)
        )
        for stage in stages
    )
    return tuple(stages), (placed, held, tuple(shared_weights(layers, stages)))


# ---- parameters ----------------------------------------------------------------------------------------------


def _trained_by_rank(
    model: nn.Module, plan: Plan, schedule: Schedule, held: Names, sharded: Sequence[Sharded]
) -> tuple[int, ...]:
    """Return, by rank, the elements of the trained parameters that it would hold if ZeRO sharded nothing."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    counts = []
    for rank in range(plan.ranks):
        place = plan.mesh.place(rank)
        shards = sharded[place.tp % len(sharded)].shards
        mine = {name: whole[name] for stage in schedule.stages_of(place.pp) for name in held[stage]}
        once = {id(p): (name, p) for name, p in mine.items() if p.requires_grad}
        counts.append(sum(prod(shards[n].shape) if n in shards else p.numel() for n, p in once.values()))
    return tuple(counts)

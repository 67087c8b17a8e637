"""Resolve a plan for a model and its batches, in one pass: `ResolvedPlan`, which everything after it reads.

    shapes        one micro-batch, or a replica's share of one, of every shape that the training will meet
    local         the model as a rank holds it: its shards of the layers, its part of each sequence
    observation   what each layer makes of each shape, on fake tensors, and the FLOPs
    stages        where the model is cut; one that is not a chain, or whose layers hand on dicts, is partitioned
    parameters    which stage computes with which, and how many elements each rank holds

If tp divides everything, all shards have the same shapes and one dry run serves all ranks; otherwise each place along
tp has its own.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from mpkit.plan.mesh import Mesh
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.context.sequence import sequence_part
from mpkit.strategies.data.microbatch import Value, one_of_each_shape
from mpkit.strategies.job.job import ResolvedPlan
from mpkit.strategies.models.chain import cut, is_chain, layers_of
from mpkit.strategies.partition.graph import PartitionedModel
from mpkit.strategies.partition.value import LayerNumbers, SharedWeight
from mpkit.strategies.prepare.copies import copy_model
from mpkit.strategies.prepare.observe import observe
from mpkit.strategies.prepare.partition import partition_model
from mpkit.strategies.runtime.local_model import localize
from mpkit.strategies.stage.shard import ShardedModel

Loss = Callable[[Any, Any], Any]


def resolve(
    model: nn.Module, sizes: list[tuple[Value, Value]], plan: Plan, loss: Loss, *, by_name: bool,
) -> ResolvedPlan:  # fmt: skip
    """Return what a plan comes to, or raise a ValueError: model, data and plan do not fit together.

    Args:
        model: the whole model, on the CPU; it is not changed.
        sizes: a batch of every size that occurs, the largest first.
    """
    schedule = plan.build()
    # ---- shapes
    shapes = one_of_each_shape(sizes, plan.microbatches, plan.dp)
    if plan.data_parallel == "dp":  # rank 0 computes the loss of the whole, and evaluates by itself
        shapes |= one_of_each_shape(sizes, plan.microbatches, 1)

    # ---- local
    copies = _copies_along(plan.tp, partial(_local_copy, model, plan, schedule))
    # ---- observation
    sends_of_loss = _LossSends(loss, copies[0])
    numbers = [
        observe(
            each.model, shapes, sends_of_loss if each is copies[0] else loss, plan,
            counts=plan.stages == 1 or is_chain(each.model), halves=schedule.splits_backward, cut=each.cut,
            attention=each.sharded.attention,
        )
        for each in copies
    ]  # fmt: skip
    # ---- stages
    partitions: list[PartitionedModel | None] = [None] * len(copies)
    handed_on = [layer.output for layers in numbers[0].values() for layer in layers[:-2]]
    if plan.stages > 1 and not (is_chain(model) and all(output is not None for output in handed_on)):
        like: PartitionedModel | None = None  # the first one: all are cut at the same places
        for place, each in enumerate(copies):
            made = partition_model(
                each.model, shapes, plan, loss,
                relays=not by_name, cut=each.cut, attention=each.sharded.attention, like=like,
            )  # fmt: skip
            partitions[place], like = made, like or made
    stages, placed, held, shared = _lay_out(
        partitions[0], layers_of(model), numbers[0], plan.stages, plan.cut
    )
    # ---- parameters
    sharded = tuple(each.sharded for each in copies)
    parameters = _trained_by_rank(model, plan.mesh, schedule, held, sharded)
    for each in copies:
        each.free()
    return ResolvedPlan(
        plan, schedule, tuple(stages), tuple(placed), tuple(held), tuple(shared), tuple(numbers), tuple(partitions),
        sharded, parameters, sends_of_loss.most,
    )  # fmt: skip


# ---- local ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalCopy:
    """A rank's model and its part of the data."""

    model: nn.Module  # the caller's own if nothing is divided
    sharded: ShardedModel
    cut: Callable[[Value], Value]  # returns the rank's part of inputs or targets
    tp: FakeGroup  # the group with which it shares its layers

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the shards, by the parameters' names."""
        return {name: shard.shape for name, shard in self.sharded.shards.items()}

    def free(self) -> None:
        """Free the shards, which would otherwise stay until Python collects reference cycles."""
        for name in self.sharded.shards:
            self.model.get_parameter(name).data = torch.empty(0)


def _local_copy(model: nn.Module, plan: Plan, schedule: Schedule, place: int) -> LocalCopy:
    """Return the model as the rank at this place along tp holds it, at place 0 along cp and ep."""
    groups = {axis: FakeGroup(plan.mesh.degree(axis)) for axis in ("cp", "ep")}
    groups["tp"] = FakeGroup(plan.tp, place)
    local, sharded = model, ShardedModel()
    if plan.tp > 1 or plan.cp > 1 or plan.ep > 1:
        # Its own modules with the caller's tensors: shards are copies of these, and nothing else is written to.
        local = copy_model(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
        sharded = localize(local, plan, schedule, groups.__getitem__)
    cut = partial(sequence_part, index=0, n=plan.cp, order=plan.cp_order)
    return LocalCopy(local, sharded, cut, groups["tp"])


def _copies_along(tp: int, copy_for: Callable[[int], LocalCopy]) -> list[LocalCopy]:
    """Return the copies of all places along tp; one if all have the same shapes."""
    first = copy_for(0)
    if tp == 1:
        return [first]
    last = copy_for(tp - 1)
    if first.shapes == last.shapes:
        last.free()
        return [first]
    return [first, *map(copy_for, range(1, tp - 1)), last]


class _LossSends:
    """A loss whose communication is counted: for vocab-parallel logits a few numbers per token, or an all-gather."""

    def __init__(self, loss: Loss, local: LocalCopy) -> None:
        self._loss, self._tp = loss, local.tp
        self.most = (0, 0)  # bytes reduced and gathered by the call with the most

    def __call__(self, outputs: Any, targets: Any) -> Any:
        before = self._tp.reduced, self._tp.gathered
        value = self._loss(outputs, targets)
        self.most = max(self.most, (self._tp.reduced - before[0], self._tp.gathered - before[1]), key=sum)
        return value


# ---- parameters ----------------------------------------------------------------------------------------------


def _trained_by_rank(
    model: nn.Module, mesh: Mesh, schedule: Schedule, held: Sequence[tuple[str, ...]], sharded: Sequence[ShardedModel]
) -> tuple[int, ...]:  # fmt: skip
    """Return, by rank, the elements of the trained parameters that it would hold if ZeRO sharded nothing."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    counts = []
    for rank in range(mesh.size):
        place = mesh.place(rank)
        shards = sharded[mesh.place(rank).tp % len(sharded)].shards
        mine = {name: whole[name] for stage in schedule.stages_of(place.pp) for name in held[stage]}
        once = {id(p): (name, p) for name, p in mine.items() if p.requires_grad}
        counts.append(sum(prod(shards[n].shape) if n in shards else p.numel() for n, p in once.values()))
    return tuple(counts)


def _lay_out(
    partition: PartitionedModel | None, layers: list[tuple[str, nn.Module]],
    numbers: dict[Hashable, list[LayerNumbers]], stages: int, points: Sequence[int | str] | None,
) -> tuple[list[range], list[tuple[str, ...]], list[tuple[str, ...]], list[SharedWeight]]:  # fmt: skip
    """Return the layers of each stage, their names, those of its parameters, and the tied weights."""
    if partition is not None:
        return [range(1)] * stages, partition.placed, partition.held, partition.shared_weights
    first = next(iter(numbers.values()))[:-1]
    costs = [layer.flops.forward + _numel(layer) for layer in first]
    parts = cut([name for name, _ in layers], costs, stages, points)
    names = [[n for n, _ in layer.named_parameters(name, remove_duplicate=False)] for name, layer in layers]
    held = [tuple(name for i in part for name in names[i]) for part in parts]
    return parts, [tuple(layers[i][0] for i in part) for part in parts], held, shared_weights(layers, parts)


def _numel(layer: LayerNumbers) -> float:
    """Return the elements of a layer's output: without a matrix product each counts as one operation."""
    return float(sum(prod(spec.shape) for spec in layer.output.specs)) if layer.output is not None else 0.0


def shared_weights(layers: list[tuple[str, nn.Module]], stages: list[range]) -> list[SharedWeight]:
    """Return the tied weights of a chain that more than one stage computes with."""
    names: dict[int, dict[int, str]] = {}  # by weight and stage
    buffers: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for prefix, layer in (layers[i] for i in stage):
            for name, parameter in layer.named_parameters(prefix):
                names.setdefault(id(parameter), {}).setdefault(number, name)
            for name, buffer in layer.named_buffers(prefix):
                first, known = buffers.setdefault(id(buffer), (number, name))
                if first != number:
                    raise ValueError(
                        f"{known!r} and {name!r} are one buffer, and would be in stages {first} and {number}: each "
                        "stage would change a copy of its own. What works: a cut that leaves both in one stage, "
                        "buffers that are not shared, or Plan.serial(). (Shared weights may be anywhere.)"
                    )
    return [SharedWeight(held) for held in names.values() if len(held) > 1]

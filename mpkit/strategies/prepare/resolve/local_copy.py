"""The model as ranks will have it, for the dry runs: sharded, and with its positions in the sequence set."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from mpkit.common.exceptions import one_line
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.strategies.comm.process_group import FakeGroup
from mpkit.strategies.context.sequence import sequence_part
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.experts.known_experts import check_experts_of
from mpkit.strategies.prepare.dry_run.copies import copy_model
from mpkit.strategies.prepare.resolve.sequences import check_context_parallel
from mpkit.strategies.runtime.local_model import attention_over, localize
from mpkit.strategies.stage.shard import ShardedModel

__all__ = ["LocalCopy", "local_copies"]


@dataclass(frozen=True)
class LocalCopy:
    """A rank's model and its part of the data.

    Attributes:
        model: the rank's model; the caller's own if nothing is divided.
        sharded: the result of tensor parallelism.
        cut: returns the rank's part of inputs or targets.
        attention: returns the context in which its forward runs.
        tp: the group with which it shares its layers.
    """

    model: nn.Module
    sharded: ShardedModel
    cut: Callable[[Value], Value]
    attention: Callable[[], AbstractContextManager[Any]]
    tp: FakeGroup

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the shards, by the parameters' names."""
        return {name: shard.shape for name, shard in self.sharded.shards.items()}

    def free(self) -> None:
        """Free the shards, which would otherwise stay until Python collects reference cycles.

        All other tensors are the caller's.
        """
        for name in self.sharded.shards:
            self.model.get_parameter(name).data = torch.empty(0)


def local_copies(
    model: nn.Module, plan: Plan, schedule: Schedule, batch: tuple[Value, Value]
) -> list[LocalCopy]:
    """Return the model as the ranks along tp hold it; one copy if all hold the same shapes."""
    first = _copy_for(model, plan, schedule, batch, 0)
    if plan.tp == 1:
        return [first]
    last = _copy_for(model, plan, schedule, batch, plan.tp - 1)
    if first.shapes == last.shapes:
        last.free()
        return [first]
    between = [_copy_for(model, plan, schedule, batch, place) for place in range(1, plan.tp - 1)]
    return [first, *between, last]


def _copy_for(
    model: nn.Module, plan: Plan, schedule: Schedule, batch: tuple[Value, Value], place: int
) -> LocalCopy:
    """Copy the model as the rank at `place` would hold it.

    Args:
        model: the whole model; it is not changed.
        plan: the plan, of which tp, cp, ep and related options are used; `schedule`: its schedule.
        batch: the largest batch, whose sequences are divided along cp.
        place: the rank's place along tp; along cp and ep it is place 0.

    Raises:
        ValueError: layers or sequences cannot be divided among so many ranks.
    """
    if plan.cp > 1 and place == 0:
        check_context_parallel(model, *batch, plan.cp, plan.cp_order, ulysses=plan.cp_method == "ulysses")
    check_experts_of(model, plan)
    mesh = plan.mesh
    tp = FakeGroup(plan.tp, place)

    def group_of(axis: str) -> FakeGroup:
        return tp if axis == "tp" else FakeGroup(mesh.degree(axis))

    sharded = ShardedModel()
    if plan.tp > 1 or plan.cp > 1 or plan.ep > 1:
        model = _with_own_modules(model)
        sharded = localize(model, plan, schedule, group_of)
    cut = partial(sequence_part, index=0, n=plan.cp, order=plan.cp_order)
    return LocalCopy(model, sharded, cut, attention_over(plan, group_of, sharded.draws), tp)


def _with_own_modules(model: nn.Module) -> nn.Module:
    """Return a copy with the caller's tensors: shards are copies of these, and nothing else is written into.

    Raises:
        ValueError: the model cannot be copied.
    """
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return copy_model(model, dict(tensors))
    except (TypeError, RuntimeError, AttributeError, pickle.PicklingError) as error:
        raise ValueError(
            f"The model cannot be copied, and so not sent to the ranks: {one_line(error)}. Locks, open files and "
            "generators are made in forward, or left out by the module's __getstate__."
        ) from None

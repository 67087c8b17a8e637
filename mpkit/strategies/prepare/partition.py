"""Partition a model that is no chain among the stages of a pipeline, before a rank starts.

blocks    which modules are opened (their forward runs as it is written), which are blocks that a rank calls as a
          whole, and where the sequence of their calls is cut
record    the dry run: the blocks, the operations between them, and which values each of them uses
divide    the stage that runs each of them, and what is sent from stage to stage
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from mpkit.common.exceptions import one_line
from mpkit.plan.plan import Plan
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.models.hooks import backward_hooks
from mpkit.strategies.partition.graph import Graph, PartitionedModel
from mpkit.strategies.partition.walk import prepare_modules
from mpkit.strategies.prepare.blocks import PartitionChoice, check_alike, choose, cut_blocks
from mpkit.strategies.prepare.copies import DryRuns
from mpkit.strategies.prepare.divide import assign_weights, divide
from mpkit.strategies.prepare.observe import Around, Backwards, kind_of_layer, of_wide_outputs, whole
from mpkit.strategies.prepare.record import CannotCut, EnteredFromOutside, record, tell_if_entered
from mpkit.strategies.replicas.batchnorm import over_whole_batch
from mpkit.strategies.stage.stage import PRECISIONS, cast

__all__ = ["partition_model"]

Loss = Callable[[Any, Any], Any]


def partition_model(
    model: nn.Module,
    shapes: Mapping[Hashable, tuple[Value, Value]],
    plan: Plan,
    loss: Loss,
    *,
    relays: bool = False,
    cut: Callable[[Value], Value] = whole,
    attention: Around = nullcontext,
    like: PartitionedModel | None = None,
) -> PartitionedModel:
    """Open a model and divide it among the plan's stages.

    Args:
        model: any module.
        shapes: a micro-batch of every shape that occurs, by its signature.
        plan: the plan, of which stages, cut points and precision are used.
        loss: the loss of the training.
        relays: as in `divide`.
        cut, attention: as in `observe`.
        like: the same model partitioned with shards of other sizes; the cut is at the same places.

    Raises:
        ValueError: it cannot be cut, or not at these points; the message says where, why, and what would work.
    """
    dtype = PRECISIONS.get(plan.precision)
    if dtype is not None:
        loss = of_wide_outputs(loss)
        shapes = {key: (cast(x, dtype), y) for key, (x, y) in shapes.items()}
    shapes = {key: (cut(x), cut(y)) for key, (x, y) in shapes.items()}
    closed = _with_backward_hooks(model)  # modules that cannot be opened, and why
    with attention():
        if like is None:
            choice, graphs = _walk_through(model, shapes, plan, loss, closed)
        else:
            choice = PartitionChoice(like.modules, like.blocks)
            dry = _Recordings(model, plan, choice)
            graphs = {key: dry.record(x, y, loss) for key, (x, y) in shapes.items()}
    check_alike(graphs.values())
    first = next(iter(graphs.values()))
    of_blocks = like.stage_of_blocks if like is not None else cut_blocks(first, plan, closed)
    divisions = {key: divide(graph, of_blocks, plan.stages, relays=relays) for key, graph in graphs.items()}
    return assign_weights(model, choice, divisions, of_blocks)


def _with_backward_hooks(model: nn.Module) -> dict[str, str]:
    """Return the modules that must be called as a whole, since a hook sees their whole backward.

    Raises:
        ValueError: the model itself is such a module.
    """
    hooks = {hook.where: hook for hook in backward_hooks(model)}
    if "" in hooks:
        raise ValueError(
            f"The model cannot be cut: {hooks['']} sees the gradients of its inputs and outputs, which are on "
            "different ranks. What works: the hook on a layer, which one rank calls as a whole; or a plan that "
            "does not cut the model: Plan.serial(), Plan.ddp(2), Plan.zero(3, 2)."
        )
    return {name: f"it has {hook}" for name, hook in hooks.items()}


def _walk_through(
    model: nn.Module,
    shapes: Mapping[Hashable, tuple[Value, Value]],
    plan: Plan,
    loss: Loss,
    closed: dict[str, str],
) -> tuple[PartitionChoice, dict[Hashable, Graph]]:
    """Return what was opened, and the graph of each shape; `closed` says which modules cannot be opened."""
    entered: set[str] = set()
    while True:
        choice = choose(model, plan.stages, plan.cut or (), closed, entered)
        dry = _Recordings(model, plan, choice)
        try:
            return choice, {key: dry.record(x, y, loss) for key, (x, y) in shapes.items()}
        except EnteredFromOutside as error:
            if error.block in closed:
                raise ValueError(_explain(model, CannotCut(error.block, closed[error.block]))) from None
            assert error.block not in entered, "it would have been opened"
            entered.add(error.block)
        except CannotCut as error:
            if error.scope == "" or error.scope in closed:
                raise ValueError(_explain(model, error)) from None
            closed[error.scope] = str(error)


class _Recordings:
    """Records graphs on copies of a model whose modules were opened."""

    def __init__(self, model: nn.Module, plan: Plan, choice: PartitionChoice) -> None:
        self._kinds: dict[str, Hashable] = {}
        self._choice, self._what = choice, f"The graph of {type(model).__name__}'s blocks"
        self._runs = DryRuns(model, PRECISIONS.get(plan.precision), self._open)
        self._backwards = Backwards(plan.build().splits_backward)
        self._shares_norms = plan.microbatches > 1 and plan.batchnorm == "sync"

    def _open(self, copied: nn.Module) -> None:
        if self._shares_norms:  # is rejected later, by name
            over_whole_batch(copied, FakeGroup(1))
        self._kinds = {name: kind_of_layer(copied.get_submodule(name)) for name in self._choice.blocks}
        for name, block in prepare_modules(copied, *self._choice).items():
            tell_if_entered(name, block)

    def record(self, inputs: Value, targets: Value, loss: Loss) -> Graph:
        """Record the graph of a micro-batch; on real tensors where control flow depends on values."""

        def run(copied: nn.Module, x: Value, y: Value) -> Graph:
            return record(copied, x, y, loss, torch.device("cpu"), self._backwards, self._kinds)

        return self._runs.run(run, inputs, targets, what=self._what, final=(CannotCut, EnteredFromOutside))


def _explain(model: nn.Module, error: CannotCut) -> str:
    where = f"{error.scope} ({type(model.get_submodule(error.scope)).__name__})"
    if error.scope == "":
        where = f"The model ({type(model).__name__})"
    return (
        f"{where} cannot be cut: between its blocks, {one_line(error).partition(': ')[2]}. What happens between blocks "
        "is done on every rank, on tensors that only one of them has. What works: put it into a module of its own, "
        "which one rank calls as a whole; or a plan that does not cut the model: Plan.serial(), Plan.ddp(2), "
        "Plan.zero(3, 2)."
    )

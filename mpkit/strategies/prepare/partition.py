"""Partition a model that is not a chain among the stages of a pipeline, before a rank starts.

blocks    which modules are opened (their forward runs as it is written), which are blocks that a rank calls as a
          whole, and where the sequence of their calls is cut
record    the dry run: the blocks, the operations between them, and which values each of them uses
divide    the stage that runs each of them, and what is sent from stage to stage: an operation between blocks runs on
          the stage that makes the last of its inputs, or on the first stage that needs its output if that means sending
          less. So a sum runs before the message, and a torch.cat of a skip after it. Each value goes directly from the
          stage that makes it to each stage that needs it; or, where messages are matched by order only (nccl), from
          neighbour to neighbour, in the order of the schedule
"""

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import nn

from mpkit.common.exceptions import one_line
from mpkit.plan.plan import Plan
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.models.hooks import backward_hooks
from mpkit.strategies.partition.graph import Division, Graph, PartitionedModel
from mpkit.strategies.partition.value import Route
from mpkit.strategies.partition.walk import prepare_modules
from mpkit.strategies.prepare.blocks import PartitionChoice, check_alike, choose, cut_blocks
from mpkit.strategies.prepare.copies import DryRuns
from mpkit.strategies.prepare.observe import Around, Backwards, kind_of_layer, of_wide_outputs, whole
from mpkit.strategies.prepare.record import CannotCut, EnteredFromOutside, record, tell_if_entered
from mpkit.strategies.replicas.batchnorm import over_whole_batch
from mpkit.strategies.stage.stage import PRECISIONS, cast

Loss = Callable[[Any, Any], Any]


def partition_model(
    model: nn.Module, shapes: Mapping[Hashable, tuple[Value, Value]], plan: Plan, loss: Loss, *,
    relays: bool = False, cut: Callable[[Value], Value] = whole, attention: Around = nullcontext,
    like: PartitionedModel | None = None,
) -> PartitionedModel:  # fmt: skip
    """Open a model and divide it among the plan's stages; a ValueError says where and why it cannot be cut.

    Args:
        shapes: a micro-batch of every shape that occurs, by its signature.
        relays: as in `divide`; `cut` and `attention`: as in `observe`.
        like: the same model partitioned with shards of other sizes; the cut is at the same places.
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
    """Return the modules that must be called as a whole, since a hook sees their whole backward."""
    hooks = {hook.where: hook for hook in backward_hooks(model)}
    if "" in hooks:
        raise ValueError(
            f"The model cannot be cut: {hooks['']} sees the gradients of its inputs and outputs, which are on "
            "different ranks. What works: the hook on a layer, which one rank calls as a whole; or a plan that "
            "does not cut the model: Plan.serial(), Plan.ddp(2), Plan.zero(3, 2)."
        )
    return {name: f"it has {hook}" for name, hook in hooks.items()}


def _walk_through(
    model: nn.Module, shapes: Mapping[Hashable, tuple[Value, Value]], plan: Plan, loss: Loss, closed: dict[str, str]
) -> tuple[PartitionChoice, dict[Hashable, Graph]]:  # fmt: skip
    """Return what was opened, and the graph of each shape; add the modules that cannot be opened to `closed`."""
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


# ---- divide --------------------------------------------------------------------------------------------------


def divide(graph: Graph, block_stages: list[int], stages: int, *, relays: bool = False) -> Division:
    """Divide a graph among stages.

    Args:
        block_stages: the stage of each of the graph's blocks, in order; it never decreases.
        relays: whether intermediate stages forward values that go further than to the next stage.
    """
    stage_of = _place(graph, dict(zip(graph.blocks, block_stages, strict=True)), stages)
    maker = {number: s for node, s in zip(graph.nodes, stage_of, strict=True) for number in node.made_values}
    needs: dict[tuple[int, int], dict[int, None]] = {}  # by (source, target), the values
    users = [(node.arguments, s) for node, s in zip(graph.nodes, stage_of, strict=True)]
    for numbers, target in (*users, (graph.wanted, stages - 1)):
        for number in numbers:
            source = maker[number]
            steps = [(s, s + 1) for s in range(source, target)] if relays else [(source, target)]
            for step in steps if source != target else []:
                needs.setdefault(step, {})[number] = None
    outputs: list[dict[int, None]] = [{} for _ in range(stages)]
    for (source, _), sent in sorted(needs.items()):
        outputs[source] |= sent
    routes = []
    for (source, target), sent in sorted(needs.items()):
        places = [list(outputs[source]).index(number) for number in sent]
        routes.append(Route(source, target, tuple(places), tuple(graph.specs[number] for number in sent)))
    return Division(graph, stage_of, list(map(tuple, outputs)), routes)


def _place(graph: Graph, of_blocks: dict[int, int], stages: int) -> list[int]:
    """Return the stage that runs each node."""
    maker = {number: k for k, node in enumerate(graph.nodes) for number in node.made_values}

    def nbytes(number: int) -> int:
        return prod(graph.specs[number].shape) * graph.specs[number].dtype.itemsize

    # ---- blocks, and the earliest stage that can run each operation
    earliest: list[int] = []
    for k, node in enumerate(graph.nodes):
        made_at = [earliest[maker[number]] for number in node.arguments]
        earliest.append(of_blocks.get(k, max(made_at, default=0)))
    # ---- between: backwards, since an operation may go where its users are
    placed = list(earliest)
    users: dict[int, list[int]] = {}  # by value, the stages that use it
    for number in graph.wanted:
        users.setdefault(number, []).append(stages - 1)
    for k in reversed(range(len(graph.nodes))):
        node = graph.nodes[k]
        if k not in of_blocks:
            used_at = [s for number in node.made_values for s in users.get(number, ())]
            latest = min(used_at, default=earliest[k])
            # what that stage receives for it, besides what it receives anyway
            missing = {number for number in node.arguments if latest not in users.get(number, ())}
            if latest > earliest[k] and sum(map(nbytes, missing)) <= sum(map(nbytes, node.made_values)):
                placed[k] = latest
        for number in node.arguments:
            users.setdefault(number, []).append(placed[k])
    return placed


def assign_weights(
    model: nn.Module, choice: PartitionChoice, divisions: dict[Hashable, Division], of_blocks: list[int]
) -> PartitionedModel:
    """Return what ranks need to know about a divided model; `of_blocks` has the stage of each call of a block."""
    modules, stages = dict(model.named_modules()), of_blocks[-1] + 1
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held: list[dict[str, None]] = [{} for _ in range(stages)]
    placed: list[dict[str, None]] = [{} for _ in range(stages)]
    for division in divisions.values():
        for node, s in zip(division.graph.nodes, division.stage_of, strict=True):
            held[s].update(dict.fromkeys(node.parameters))
            if node.block:
                placed[s][node.name] = None
                held[s].update(dict.fromkeys(names[id(p)] for p in modules[node.name].parameters()))
    _check_buffers(modules, placed)
    used = {name for stage in held for name in stage}
    held[0].update(dict.fromkeys(name for name in names.values() if name not in used))
    state = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) in names:
            state[key] = next(s for s in range(stages) if names[id(value)] in held[s])
        else:
            inside = (s for s in range(stages) for block in placed[s] if key.startswith(f"{block}."))
            state[key] = max(inside, default=0)
    by_stage = [tuple(stage) for stage in held], [tuple(stage) for stage in placed]
    return PartitionedModel(choice.modules, choice.blocks, divisions, *by_stage, state, of_blocks)


def _check_buffers(modules: dict[str, nn.Module], placed: list[dict[str, None]]) -> None:
    """Reject a block with statistics that is called in two stages: each would keep its own statistics."""
    for name in dict.fromkeys(name for stage in placed for name in stage):
        stages = [s for s, blocks in enumerate(placed) if name in blocks]
        keeps = [key for key, _ in modules[name].named_buffers() if modules[name].training]
        if len(stages) > 1 and keeps:
            raise ValueError(
                f"{name} is called in the stages {', '.join(map(str, stages))}, and keeps {keeps[0]}, of which each "
                "stage would change a copy of its own. What works: a cut that leaves its calls in one stage, a block "
                "of its own for each call, model.eval() if it is not to change, or Plan.serial(). (Shared weights may "
                "be anywhere.)"
            )

"""Divide a graph among stages: which stage runs each node and holds each weight, and what stages send to each other.

blocks     as the model is cut
between    an operation between blocks runs on the stage that makes the last of its inputs, or on the first stage that
           needs its output if that means sending less: a sum runs before the message, a torch.cat of a skip after it
routes     each value goes directly from the stage that makes it to each stage that needs it; or, where messages are
           matched by order only (nccl), from neighbour to neighbour, in the order of the schedule
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod

from torch import nn

from mpkit.strategies.partition.graph import Division, Graph, PartitionedModel
from mpkit.strategies.partition.value import Route
from mpkit.strategies.prepare.blocks import PartitionChoice

__all__ = ["assign_weights", "divide"]


def divide(graph: Graph, block_stages: list[int], stages: int, *, relays: bool = False) -> Division:
    """Divide a graph among stages.

    Args:
        block_stages: the stage of each of the graph's blocks, in order; it never decreases.
        stages: the number of stages.
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
    outputs = [
        tuple(
            dict.fromkeys(
                number for (source, _), numbers in sorted(needs.items()) if source == s for number in numbers
            )
        )
        for s in range(stages)
    ]
    routes = [
        Route(
            source,
            target,
            tuple(outputs[source].index(number) for number in numbers),
            tuple(graph.specs[number] for number in numbers),
        )
        for (source, target), numbers in sorted(needs.items())
    ]
    return Division(graph, stage_of, outputs, routes)


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
            latest = min(
                (s for number in node.made_values for s in users.get(number, ())), default=earliest[k]
            )
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
    """Return what ranks need to know about a divided model.

    Args:
        model: the user's model.
        choice: which of its modules were opened.
        divisions: the divisions by signature of a micro-batch.
        of_blocks: the stage of each call of a block.

    Raises:
        ValueError: stages share state that each would change on its own.
    """
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
    return PartitionedModel(
        choice.modules,
        choice.blocks,
        divisions,
        [tuple(stage) for stage in held],
        [tuple(stage) for stage in placed],
        state,
        of_blocks,
    )


def _check_buffers(modules: dict[str, nn.Module], placed: list[dict[str, None]]) -> None:
    """Refuse a block with statistics that is called in two stages: each would keep its own statistics."""
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

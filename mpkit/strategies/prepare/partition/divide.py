"""Divide a graph among stages: which stage runs each node, and therefore what stages send to each other.

blocks     as the model is cut
between    an operation between blocks runs on the stage that makes the last of its inputs, or on the first stage that
           needs its output if that means sending less: a sum runs before the message, a torch.cat of a skip after it
routes     each value goes directly from the stage that makes it to each stage that needs it; or, where messages are
           matched by order only (nccl), from neighbour to neighbour, in the order of the schedule
"""

from __future__ import annotations

from math import prod

from mpkit.strategies.partition.boundary import Route, Spec
from mpkit.strategies.partition.graph import CallNode, Division, Graph

__all__ = ["divide"]


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
            if latest > earliest[k] and _received_bytes(graph, node, users, latest) <= _sent_bytes(
                graph, node
            ):
                placed[k] = latest
        for number in node.arguments:
            users.setdefault(number, []).append(placed[k])
    return placed


def _received_bytes(graph: Graph, node: CallNode, users: dict[int, list[int]], stage: int) -> int:
    """Return the bytes that a stage must receive to run the node, besides what it receives anyway."""
    missing = {number for number in node.arguments if stage not in users.get(number, ())}
    return sum(_nbytes(graph.specs[number]) for number in missing)


def _sent_bytes(graph: Graph, node: CallNode) -> int:
    return sum(_nbytes(graph.specs[number]) for number in node.made_values)


def _nbytes(spec: Spec) -> int:
    return prod(spec.shape) * spec.dtype.itemsize

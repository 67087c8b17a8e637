"""The calls of a model's blocks in order, and where this sequence is cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mpkit.plan.plan import Plan
from mpkit.strategies.models.cut import cut
from mpkit.strategies.partition.graph import Graph

__all__ = ["Start", "calls_of", "groups_of", "stages_of_blocks", "starts"]

Start = tuple[str, int]
"""The first call of a stage: a block, and the number of the call of that block."""


def starts(graph: Graph, plan: Plan, closed: dict[str, str]) -> list[Start]:
    """Return the first call of each stage but stage 0.

    Args:
        graph: the graph of the first shape.
        plan: the plan with the stages and, if given, the cut points.
        closed: modules that could not be opened, and why.

    Raises:
        ValueError: there are too few blocks, or none at a cut point.
    """
    calls, groups = calls_of(graph), groups_of(graph)
    names = [calls[group[0]][0] for group in groups]
    nodes = [graph.nodes[k] for k in graph.blocks]
    costs = [
        sum(
            nodes[i].flops.forward + sum(prod(graph.specs[n].shape) for n in nodes[i].made_values)
            for i in group
        )
        for group in groups
    ]
    try:
        stages = cut(names, costs, plan.stages, None if plan.cut is None else _points(plan.cut, names))
    except ValueError as error:
        whole = [f"{name} is cut nowhere within: {why}" for name, why in closed.items()]
        raise ValueError(". ".join([str(error).rstrip("."), *whole]) + ".") from None
    return [calls[groups[stage.start][0]] for stage in stages[1:]]


def _points(given: Sequence[int | str], names: list[str]) -> list[int | str]:
    """Return the user's cut points; one that is not a block is replaced by the first block within."""
    return [
        point if point in names else next((n for n in names if n.startswith(f"{point}.")), point)
        for point in given
    ]


def groups_of(graph: Graph) -> list[list[int]]:
    """Return the groups that are not cut: consecutive calls of the same block, by their numbers."""
    calls = calls_of(graph)
    groups: list[list[int]] = []
    for i, (name, _) in enumerate(calls):
        if groups and calls[groups[-1][-1]][0] == name:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def calls_of(graph: Graph) -> list[Start]:
    """Return every call: the block, and the number of the call of that block."""
    seen: dict[str, int] = {}
    calls = []
    for k in graph.blocks:
        name = graph.nodes[k].name
        calls.append((name, seen.get(name, 0)))
        seen[name] = seen.get(name, 0) + 1
    return calls


def stages_of_blocks(graph: Graph, first: list[Start]) -> list[int]:
    """Return the stage of each call.

    Args:
        graph: the graph of any shape.
        first: the result of `starts`.

    Raises:
        ValueError: the calls are in a different order than in the graph that was cut.
    """
    calls = calls_of(graph)
    at = [calls.index(start) if start in calls else -1 for start in first]
    if at != sorted(at) or -1 in at:
        raise ValueError(
            "The model calls its blocks in another order for micro-batches of another shape, so that it cannot be cut "
            f"before {', '.join(name for name, _ in first)} for all. Batches of one shape can be trained on, or "
            "Plan.serial() with these."
        )
    return [sum(i >= start for start in at) for i in range(len(calls))]

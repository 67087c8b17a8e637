"""The blocks of a model: which modules are opened, which are blocks, in which order they are called, where it is cut.

opened    the model itself; modules that contain cut points, a list of layers, or too much for one stage; and modules
          without state and hooks, such as Dropout: their forward runs as it is written, on every rank
blocks    all other modules that opened ones call, above all the entries of lists of layers: the rank that holds a block
          calls it as a whole
calls     of the blocks, one after the other; consecutive calls of the same block are not cut
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import nn

from mpkit.plan.plan import Plan
from mpkit.strategies.models.chain import cut, is_chain
from mpkit.strategies.models.hooks import is_bare
from mpkit.strategies.partition.graph import Graph


class PartitionChoice(NamedTuple):
    """The names of the opened modules and of the blocks."""

    modules: tuple[str, ...]
    blocks: tuple[str, ...]


def choose(
    model: nn.Module, stages: int, cut: Sequence[int | str] = (), closed: Collection[str] = (),
    entered: Collection[str] = (),
) -> PartitionChoice:  # fmt: skip
    """Choose what to open so that the model can be cut into this many stages.

    Modules that contain one of the user's `cut` points are opened, `closed` ones cannot be opened, and `entered` ones
    must be, since other code calls their submodules directly.

    >>> model = nn.Module()
    >>> model.embedding, model.dropout = nn.Embedding(5, 3), nn.Dropout()
    >>> model.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    >>> choose(model, 2)
    PartitionChoice(modules=('', 'dropout'), blocks=('embedding', 'layers.0', 'layers.1'))
    """
    points = [point for point in cut if isinstance(point, str)]
    names = {module: name for name, module in model.named_modules()}  # a shared module by its first name
    share = _weight(model) / stages
    opened: dict[str, None] = {}
    blocks: dict[str, None] = {}

    def opens(name: str, module: nn.Module) -> bool:
        if name in entered or any(point.startswith(f"{name}.") for point in points):
            return True
        if isinstance(module, torch.jit.ScriptModule):
            return False
        in_list = name.rpartition(".")[2].isdigit()
        if (not _has_state(module) and is_bare(module)) or (is_chain(module) and not in_list):
            return True
        inner = [child for child in _called_modules(module) if _has_state(child)]
        while len(inner) == 1:  # skip wrappers
            inner = [child for child in _called_modules(inner[0]) if _has_state(child)]
        weight = _weight(module)
        return len(inner) > 1 and (weight > share or (2 * weight > share and _has_list(module)))

    def visit(name: str, module: nn.Module) -> None:
        opened[name] = None
        for child in _called_modules(module):
            inner = names[child]
            if inner not in closed and opens(inner, child):
                visit(inner, child)
            else:
                blocks[inner] = None

    visit("", model)
    return PartitionChoice(tuple(opened), tuple(blocks))


def _called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a module may call: its children, and those of its lists."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_modules(child)
        else:
            yield child


def _has_list(module: nn.Module) -> bool:
    return any(
        (isinstance(inner, nn.ModuleList) or is_chain(inner)) and sum(map(_has_state, inner.children())) > 1
        for inner in module.modules()
        if inner is not module
    )


def _has_state(module: nn.Module) -> bool:
    persistent = (
        name not in inner._non_persistent_buffers_set
        for inner in module.modules()
        for name, _ in inner.named_buffers(recurse=False)
    )
    return any(True for _ in module.parameters()) or any(persistent)


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def cut_blocks(graph: Graph, plan: Plan, closed: dict[str, str]) -> list[int]:
    """Return the stage of each call of a block, or raise a ValueError: there are too few, or none at a cut point.

    `closed` says which modules could not be opened, and why.
    """
    nodes, groups = [graph.nodes[k] for k in graph.blocks], groups_of(graph)
    names = [nodes[group[0]].name for group in groups]
    made = [sum(prod(graph.specs[n].shape) for n in node.made_values) for node in nodes]
    costs = [sum(nodes[i].flops.forward + made[i] for i in group) for group in groups]
    try:
        stages = cut(names, costs, plan.stages, None if plan.cut is None else _points(plan.cut, names))
    except ValueError as error:
        whole = [f"{name} is cut nowhere within: {why}" for name, why in closed.items()]
        raise ValueError(". ".join([str(error).rstrip("."), *whole]) + ".") from None
    return [number for number, stage in enumerate(stages) for group in stage for _ in groups[group]]


def _points(given: Sequence[int | str], names: list[str]) -> list[int | str]:
    """Return the user's cut points; one that is not a block becomes the first block within."""
    return [
        point if point in names else next((n for n in names if n.startswith(f"{point}.")), point)
        for point in given
    ]


def groups_of(graph: Graph) -> list[list[int]]:
    """Return the groups that are not cut: consecutive calls of the same block, by their numbers."""
    calls = [(i, graph.nodes[k].name) for i, k in enumerate(graph.blocks)]
    return [[i for i, _ in group] for _, group in groupby(calls, key=itemgetter(1))]


def check_alike(graphs: Collection[Graph]) -> None:
    """Check that the model calls the same blocks in the same order for micro-batches of every shape."""
    if len({tuple(graph.nodes[k].name for k in graph.blocks) for graph in graphs}) > 1:
        raise ValueError(
            "The model calls other blocks, or in another order, for micro-batches of another shape, so that it cannot "
            "be cut for all. Batches of one shape can be trained on, or Plan.serial() with these."
        )

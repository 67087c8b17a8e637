"""The repeated blocks of a model: a transformer's layers, a ResNet's residual blocks.

They are what FSDP users wrap, and what Megatron and torchtitan recompute: similar modules that follow each other and
make up most of a model.

    list        modules in one nn.ModuleList or nn.Sequential, or side by side as attributes, some of which are
                alike
    alike       of the same class, with at least half of their parameters of the same names and shapes: T5's first
                layer has one table more than the others, and DeepSeek's first layers have no experts
    outermost   a layer of a Mixtral is a block, its experts are not; the stages of a Swin differ in width and so are
                not alike: the layers inside them are the blocks
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import nn

from mpkit.common.tracebacks import public

__all__ = ["repeated_blocks"]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@public
def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks of a model, by name, in the order in which they are registered.

    >>> layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
    >>> list(repeated_blocks(nn.ModuleDict({"embed": nn.Embedding(4, 2), "layers": layers})))
    ['layers.0', 'layers.1', 'layers.2']
    >>> repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))  # a layer is no block
    {}
    """
    return dict(_blocks_within("", model))


def _blocks_within(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of the blocks inside a module."""
    names = {id(child): f"{prefix}{name}" for name, child in module.named_children()}
    inner = {id(child): list(_blocks_within(f"{names[id(child)]}.", child)) for child in module.children()}
    candidates = [child for child in module.children() if _is_composite(child)]
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        # Two towers side by side are not blocks, but their layers are.
        candidates = [
            child for child in candidates if not inner[id(child)] and not isinstance(child, CONTAINERS)
        ]
    alike = _repeated_classes(candidates)
    if isinstance(module, nn.ModuleList):  # a list with one block, or with blocks that all differ
        blocks = {id(child) for child in candidates if alike or not inner[id(child)]}
    else:
        blocks = {id(child) for child in candidates if type(child) in alike}
    for child in module.children():
        if id(child) in blocks:
            yield names[id(child)], child
        else:
            yield from inner[id(child)]


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module contains other modules and has parameters."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _repeated_classes(modules: list[nn.Module]) -> set[type]:
    """Return the classes of which at least two of the modules are alike."""
    by_class: dict[type, list[set[tuple[str, torch.Size]]]] = {}
    for module in modules:
        has = {(name, parameter.shape) for name, parameter in module.named_parameters()}
        by_class.setdefault(type(module), []).append(has)
    return {
        kind
        for kind, kinds_of in by_class.items()
        if any(2 * len(one & other) >= max(len(one), len(other)) for one, other in combinations(kinds_of, 2))
    }

"""Choose which modules of a model are opened, and which are its blocks.

opened    the model itself; modules that contain cut points, a list of layers, or too much for one stage; and modules
          without state and hooks, such as Dropout: their forward runs as it is written, on every rank
blocks    all other modules that opened ones call, above all the entries of lists of layers: each is called as a whole
          by the rank that holds it
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from mpkit.strategies.models.chain import is_chain
from mpkit.strategies.models.hooks import is_bare

__all__ = ["PartitionChoice", "choose"]


class PartitionChoice(NamedTuple):
    """The names of the opened modules and of the blocks."""

    modules: tuple[str, ...]
    blocks: tuple[str, ...]


def choose(
    model: nn.Module,
    stages: int,
    cut: Sequence[int | str] = (),
    closed: Collection[str] = (),
    entered: Collection[str] = (),
) -> PartitionChoice:
    """Choose what to open so that the model can be cut into this many stages.

    Args:
        cut: the user's cut points; a module that contains one of them is opened.
        closed: modules that cannot be opened.
        entered: modules that must be opened, since other code calls their submodules directly.

    >>> model = nn.Module()
    >>> model.embedding, model.dropout = nn.Embedding(5, 3), nn.Dropout()
    >>> model.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    >>> choose(model, 2)
    PartitionChoice(modules=('', 'dropout'), blocks=('embedding', 'layers.0', 'layers.1'))
    """
    points = [point for point in cut if isinstance(point, str)]
    chooser = _Chooser(model, stages, points, closed, entered)
    chooser.visit("", model)
    return PartitionChoice(tuple(dict.fromkeys(chooser.opened)), tuple(dict.fromkeys(chooser.blocks)))


class _Chooser:
    def __init__(
        self,
        model: nn.Module,
        stages: int,
        cut: list[str],
        closed: Collection[str],
        entered: Collection[str],
    ) -> None:
        self._names = {
            module: name for name, module in model.named_modules()
        }  # a shared module by its first name
        self._share = _weight(model) / stages
        self._cut, self._closed, self._entered = cut, closed, entered
        self.opened: list[str] = []
        self.blocks: list[str] = []

    def visit(self, name: str, module: nn.Module) -> None:
        self.opened.append(name)
        for child in _called_modules(module):
            inner = self._names[child]
            if inner not in self._closed and self._opens(inner, child):
                self.visit(inner, child)
            else:
                self.blocks.append(inner)

    def _opens(self, name: str, module: nn.Module) -> bool:
        if name in self._entered or any(point.startswith(f"{name}.") for point in self._cut):
            return True
        if not _has_state(module) and is_bare(module):
            return True
        if is_chain(module) and not self._is_entry(name):
            return True
        inner = [child for child in _called_modules(module) if _has_state(child)]
        while len(inner) == 1:  # skip wrappers
            inner = [child for child in _called_modules(inner[0]) if _has_state(child)]
        weight = _weight(module)
        return len(inner) > 1 and (weight > self._share or (2 * weight > self._share and _has_list(module)))

    def _is_entry(self, name: str) -> bool:
        """Return whether it is an entry of a list of layers, whose names are numbers."""
        return name.rpartition(".")[2].isdigit()


def _called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a module may call: its children, and those of its lists."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_modules(child)
        else:
            yield child


def _has_list(module: nn.Module) -> bool:
    """Return whether the module contains a list of layers."""
    return any(
        (isinstance(inner, nn.ModuleList) or is_chain(inner)) and sum(map(_has_state, inner.children())) > 1
        for inner in module.modules()
        if inner is not module
    )


def _has_state(module: nn.Module) -> bool:
    persistent = (
        name not in inner._non_persistent_buffers_set for inner in module.modules() for name in inner._buffers
    )
    return any(True for _ in module.parameters()) or any(persistent)


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

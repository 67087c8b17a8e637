"""The Python state of model, loss and optimizer from one step to the next: counters, factors, modes; no weights.

A step that another process computes again later has to start from the same state.
"""

import random
from collections.abc import Iterator
from functools import cache
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (list, dict, set, tuple)
OWN = frozenset(vars(nn.Module())) - {"training"}
"""What torch itself keeps in a module."""

SOURCES = (Iterator, random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Objects that may change with each use, without a trace that can be read."""

Remembered: TypeAlias = "dict[tuple[str, str], Any]"
"""Values by their holder's place and their name, such as ("block.0", "calls")."""


@cache
def own_of_optimizer() -> set[str]:
    """Return what torch keeps in an optimizer, and in its groups besides hyperparameters.

    A process's first optimizer imports torch._dynamo, which takes two seconds.
    """
    return {*vars(torch.optim.SGD([torch.zeros(1)])), "params", "param_names", "initial_lr"}


class PythonState:
    """What model, loss and optimizer remember.

    A loss that is a function remembers in the variables around it. Of an optimizer, its attributes and those of its
    groups count, not its states.

    >>> model = nn.Sequential(nn.Dropout())
    >>> state = PythonState(model, None)
    >>> _ = model[0].eval()
    >>> state.find_changes()
    ({('0', 'training'): False}, [])
    """

    def __init__(self, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._holders = dict(_holders("", model, set())) | dict(_holders("loss", loss, set()))
        if optimizer is not None:
            groups = {f"optimizer.group {i}": group for i, group in enumerate(optimizer.param_groups)}
            self._holders |= groups | {"optimizer": vars(optimizer)}
        self._first = dict(self._values())
        self._marks = {place: _mark(value) for place, value in self._first.items()}

    def find_changes(self) -> tuple[Remembered, list[str]]:
        """Return what has changed since this was made: values that can be sent, and the places of others in words."""
        values: Remembered = {}
        others = []
        for place, value in self._values():
            if place in self._marks and self._marks[place] == _mark(value):
                continue
            if isinstance(value, PLAIN):
                values[place] = value
            elif isinstance(value, Tensor):
                values[place] = value.detach().cpu().clone()
            else:
                others.append(_words(place))
        return values, others

    def restore(self, values: Remembered) -> list[str]:
        """Start from another process's values; return the places, in words, of those with another shape here."""
        others = []
        for place, value in (self._first | values).items():
            if place not in values and not _plain(value):
                continue
            holder, name = self._holders.get(place[0], {}), place[1]
            here = holder.get(name)
            if isinstance(value, Tensor) and getattr(here, "shape", None) != value.shape:
                others.append(_words(place))
            elif isinstance(here, CellType):
                here.cell_contents = value
            else:
                holder[name] = value
        return others

    def _values(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for path, holder in self._holders.items():
            for name, held in holder.items():
                value = held.cell_contents if isinstance(held, CellType) else held
                own = own_of_optimizer() if path.startswith("optimizer") else OWN
                if name not in own and (_plain(value) or _remembers(value)):
                    yield (path, name), value


def _holders(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the variables of a module and its parts, or of an object or function and its callees, by their place."""
    if isinstance(value, MethodType):
        value = value.__self__
    if id(value) in seen or isinstance(value, (type, Tensor)):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for name, module in value.named_modules(prefix=path):
            yield name, vars(module)
    elif isinstance(value, FunctionType):
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        cells = {name: cell for name, cell in cells.items() if cell != CellType()}  # which is empty
        yield path, cells
        for name, cell in cells.items():
            yield from _holders(f"{path}.{name}", cell.cell_contents, seen)
    elif callable(value) and hasattr(value, "__dict__"):
        yield path, vars(value)
        for name, held in list(vars(value).items()):
            yield from _holders(f"{path}.{name}", held, seen)


def _plain(value: Any) -> bool:
    return isinstance(value, PLAIN)


def _remembers(value: Any) -> bool:
    """Return whether a value that is not plain may remember something, and neither is nor holds weights."""
    if isinstance(value, CONTAINERS):
        return not any(isinstance(each, (nn.Parameter, nn.Module)) for each in value)
    return isinstance(value, SOURCES) or (isinstance(value, Tensor) and not value.requires_grad)


def _mark(value: Any) -> Any:
    """Return a mark that differs once a value has changed."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, SOURCES):
        return object()  # which equals nothing else: it cannot be known
    return (id(value), len(value)) if isinstance(value, CONTAINERS) else value


def _words(place: tuple[str, str]) -> str:
    return ".".join(part for part in place if part)

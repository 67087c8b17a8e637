"""Containers that a function changes: it gets a copy of its arguments' structure, so the change has to be brought back.

returned    a container that the function changes and returns: the caller's gets the same parts
lost        one that it changes and does not return, which is refused, since nobody would see it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpkit.strategies.models.nested_values import LEAF, IsWhole, flatten

__all__ = ["Containers", "bring_back"]


class Containers:
    """The lists, dicts and objects within a value, whose parts a function may exchange that gets a copy of them.

    >>> given, items = [], []
    >>> containers = Containers((items, {"a": 1}))
    >>> items.append(1)  # the function does this
    >>> containers.lost_containers(result=None), containers.lost_containers(result=(items, 2))
    ([[1]], [])
    >>> bring_back((given, {"a": 1}), ([1], 2), containers.returned_containers(result=(items, 2)))
    >>> given
    [1]
    """

    def __init__(self, value: Any, is_whole: IsWhole = lambda _: False) -> None:
        self._is_whole = is_whole
        self._parts = [(each, self._identity(each)) for each in _containers(value, is_whole)]

    def _identity(self, container: Any) -> Any:
        leaves, shape = flatten(container, self._is_whole)
        return [id(leaf) for leaf in leaves], shape

    def _changed_containers(self) -> dict[int, Any]:
        """Return the containers whose parts are others than before, by number."""
        return {i: each for i, (each, parts) in enumerate(self._parts) if self._identity(each) != parts}

    def returned_containers(self, result: Any) -> list[tuple[int, int]]:
        """Return which of the changed containers, by number, are which of those in a result."""
        changed = self._changed_containers()
        after = [id(each) for each in _containers(result, self._is_whole)] if changed else []
        return [(i, after.index(id(each))) for i, each in changed.items() if id(each) in after]

    def lost_containers(self, result: Any) -> list[Any]:
        """Return the changed containers that are not in a result, or whose parts nobody can set."""
        returned = {i for i, _ in self.returned_containers(result)}
        return [
            each
            for i, each in self._changed_containers().items()
            if i not in returned or not _is_settable(each)
        ]


def bring_back(
    value: Any, result: Any, returned: Sequence[tuple[int, int]], is_whole: IsWhole = lambda _: False
) -> None:
    """Give containers in a value the parts of their copies in a result (`Containers.returned_containers`)."""
    if not returned:
        return
    before, after = list(_containers(value, is_whole)), list(_containers(result, is_whole))
    for i, j in returned:
        container, copied = before[i], after[j]
        if isinstance(container, (list, dict)):
            parts = copied.copy()
            container.clear()
            if isinstance(container, dict):
                container.update(parts)
            else:
                container.extend(parts)
        if hasattr(container, "__dict__"):
            vars(container).update(vars(copied))


def _is_settable(container: Any) -> bool:
    return isinstance(container, (list, dict)) or hasattr(container, "__dict__")


def _containers(value: Any, is_whole: IsWhole, within: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yield what can be changed in a value, whatever is outermost first."""
    if flatten(value, is_whole)[1] == LEAF or any(value is outer for outer in within):
        return
    if not isinstance(value, tuple):
        yield value
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (tuple, list)):
        parts = list(value)
    else:
        parts = list(vars(value).values()) if hasattr(value, "__dict__") else []
    for part in parts:
        yield from _containers(part, is_whole, (*within, value))

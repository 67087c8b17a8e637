"""Attributes of other modules and classes that are replaced for a while."""

from __future__ import annotations

from typing import Any

__all__ = ["Replacements"]


class Replacements:
    """What was replaced, to be restored in the reverse order.

    >>> import math
    >>> replaced = Replacements()
    >>> replaced.put(math, "pi", 3)
    >>> math.pi
    3
    >>> replaced.restore()
    >>> math.pi > 3
    True
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace the attribute `name` of `owner`, a module or a class, by `value`."""
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Put everything back."""
        while self._before:
            setattr(*self._before.pop())

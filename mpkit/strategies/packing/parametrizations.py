"""Pickling of parametrized modules.

`torch.nn.utils.parametrize` (weight_norm, spectral_norm, orthogonal) gives a module a dynamically created class, which
cannot be pickled. The module is sent as its original class and its state, and is parametrized again on arrival.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["taken_apart"]


def taken_apart(obj: Any) -> tuple[Any, ...] | None:
    """Return what pickle needs to rebuild a parametrized module; None for any other object."""
    parametrize = sys.modules.get("torch.nn.utils.parametrize")  # not imported: nothing is parametrized
    if parametrize is None or "parametrizations" not in getattr(obj, "_modules", ()):
        return None
    base = type(obj).__mro__[1]
    if not parametrize.is_parametrized(obj) or type(obj).__name__ != f"Parametrized{base.__name__}":
        return None
    state: Any = base.__getstate__
    return _empty, (base,), state(obj), None, None, _parametrize


def _empty(kind: Any) -> Any:
    return kind.__new__(kind)


def _parametrize(module: Any, state: dict[str, Any]) -> None:
    """Turn an empty module into the parametrized one with this state."""
    from mpkit.common.torch_private import _inject_new_class, _inject_property

    module.__setstate__(state)
    _inject_new_class(module)
    for name in module.parametrizations:
        _inject_property(module, name)

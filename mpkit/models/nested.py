"""Structures: values passed from module to module, flattened into leaves and rebuilt.

Structures are tuples, lists, dicts, dataclasses, named tuples, and whatever a library has registered with PyTorch's
pytree (transformers does so for its outputs). Everything else is a leaf: a tensor, None, a number, an object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES  # private: tests/partition/test_any_model.py guards it

__all__ = ["Shape", "flatten", "rebuild"]


@dataclass(frozen=True)
class Shape:
    """The structure that holds leaves; plain data.

    Attributes:
        kind: "leaf", or the class that holds the parts.
        names: the names of the parts, if they have names.
        parts: the Shape of each part.
        context: what PyTorch needs to rebuild a registered class.
    """

    kind: Any
    parts: tuple[Shape, ...] = ()
    names: tuple[Any, ...] = ()
    context: Any = None


LEAF = Shape("leaf")


def flatten(value: Any) -> tuple[list[Any], Shape]:
    """Return the leaves of a value, in order, and the structure that holds them.

    >>> leaves, shape = flatten(((1, None), {"a": [2]}))
    >>> leaves, rebuild(shape, [10, 20, 30])
    ([1, None, 2], ((10, 20), {'a': [30]}))
    """
    leaves: list[Any] = []
    return leaves, _take_apart(value, leaves.append)


def _take_apart(value: Any, visit: Callable[[Any], None]) -> Shape:
    kind = type(value)
    if isinstance(value, Tensor) or value is None:
        visit(value)
        return LEAF
    if kind is tuple or kind is list:
        return Shape(kind, tuple([_take_apart(part, visit) for part in value]))
    if kind is dict or kind is OrderedDict:
        return Shape(kind, tuple([_take_apart(part, visit) for part in value.values()]), tuple(value))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return Shape(kind, tuple([_take_apart(part, visit) for part in value]), kind._fields)
    if kind in SUPPORTED_NODES:
        inner, context = SUPPORTED_NODES[kind].flatten_fn(value)
        return Shape(kind, tuple([_take_apart(part, visit) for part in inner]), context=context)
    if is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in fields(value))
        return Shape(kind, tuple([_take_apart(getattr(value, name), visit) for name in names]), names)
    visit(value)
    return LEAF


def rebuild(shape: Shape, leaves: list[Any]) -> Any:
    """Rebuild a value from its leaves; the inverse of `flatten`."""
    rest = iter(leaves)
    made = _put_together(shape, lambda: next(rest))
    return made


def _put_together(shape: Shape, leaf: Callable[[], Any]) -> Any:
    kind = shape.kind
    if kind == "leaf":
        return leaf()
    parts = [_put_together(part, leaf) for part in shape.parts]
    if kind is tuple or kind is list:
        return kind(parts)
    if kind is dict or kind is OrderedDict:
        return kind(zip(shape.names, parts, strict=True))
    if kind in SUPPORTED_NODES:
        return SUPPORTED_NODES[kind].unflatten_fn(parts, shape.context)
    if issubclass(kind, tuple):
        return kind(*parts)
    made = object.__new__(
        kind
    )  # a dataclass as it was: neither its __init__ nor its __post_init__ runs again
    for name, part in zip(shape.names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made

"""Structures: values passed from module to module, flattened into leaves and rebuilt.

Structures are dataclasses, and the values that torch's pytree flattens: tuples, lists, dicts, named tuples, and classes
registered by `torch.utils._pytree.register_pytree_node`, such as transformers' outputs. Everything else is a leaf.
"""

from __future__ import annotations

import gc
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.common.torch_private import SUPPORTED_NODES

ATOMS = (
    bool, int, float, complex, str, bytes, range, slice, type, Enum, ModuleType, BuiltinFunctionType, nn.Module,
    np.ndarray, np.generic, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator,
)  # fmt: skip
"""Leaves that hold no tensors, or that nothing looks into."""

REGISTER = "a tuple, list, dict or dataclass of tensors, or a class that torch.utils._pytree.register_pytree_node knows"
"""Alternatives to an object that cannot be looked into."""


@dataclass(frozen=True)
class Shape:
    """The structure that holds leaves; plain data."""

    kind: Any  # "leaf", or the class that holds the parts
    parts: tuple[Shape, ...] = ()
    context: Any = None  # what else is needed to rebuild the value, such as a dict's keys


LEAF = Shape("leaf")
NODES: dict[Any, Any] = SUPPORTED_NODES
"""How torch's pytree flattens each class; named tuples share a row."""


def flatten(value: Any) -> tuple[list[Any], Shape]:
    """Return the leaves of a value, in order, and the structure that holds them.

    >>> leaves, shape = flatten(((1, None), {"a": [2]}))
    >>> leaves, rebuild(shape, [10, 20, 30])
    ([1, None, 2], ((10, 20), {'a': [30]}))
    """
    leaves: list[Any] = []
    return leaves, _take_apart(value, leaves.append, ())


def _take_apart(value: Any, visit: Callable[[Any], None], within: tuple[int, ...]) -> Shape:
    """Visit the leaves of a value, which is inside the dataclasses `within`, by id, and return its Shape."""
    kind = type(value)
    if isinstance(value, Tensor) or value is None or isinstance(value, ATOMS):
        visit(value)
        return LEAF
    is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
    node = NODES.get(namedtuple if is_named_tuple else kind)
    if node is not None:
        parts, context = node.flatten_fn(value)
    elif is_dataclass(value) and id(value) not in within:
        context = tuple(vars(value)) if hasattr(value, "__dict__") else tuple(f.name for f in fields(value))
        parts, within = [getattr(value, name) for name in context], (*within, id(value))
    else:
        visit(value)
        return LEAF
    return Shape(kind, tuple([_take_apart(part, visit, within) for part in parts]), context)


def rebuild(shape: Shape, leaves: list[Any]) -> Any:
    """Rebuild a value from its leaves; the inverse of `flatten`."""
    rest = iter(leaves)
    return _put_together(shape, lambda: next(rest))


def _put_together(shape: Shape, leaf: Callable[[], Any]) -> Any:
    kind = shape.kind
    if kind == "leaf":
        return leaf()
    parts = [_put_together(part, leaf) for part in shape.parts]
    node = NODES.get(namedtuple if hasattr(kind, "_fields") else kind)
    if node is not None:
        return node.unflatten_fn(parts, shape.context)
    made = kind.__new__(kind)  # neither its __init__ nor its __post_init__ runs again
    for name, part in zip(shape.context, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


def is_opaque(leaf: Any) -> bool:
    """Return whether a leaf may hold tensors that `flatten` does not find: an iterator, a closure, an object.

    >>> is_opaque(len), is_opaque(3.0), is_opaque(x for x in [1]), is_opaque({torch.ones(1)})
    (False, False, True, True)
    """
    if isinstance(leaf, Tensor):
        return False
    return isinstance(leaf, Iterator) or any(True for _ in tensors_inside(leaf))


def tensors_inside(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors that a value holds at any depth, also in objects: in a cache, or in a closure."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    if value is None or isinstance(value, (Tensor, *ATOMS)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        inside: Any = value.__closure__ or ()
    elif isinstance(value, MethodType):
        inside = value.__self__, value.__func__
    else:
        inside = gc.get_referents(value)
    for each in inside:
        yield from tensors_inside(each, seen)

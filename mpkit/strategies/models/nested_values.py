"""Structures: values passed from module to module, flattened into leaves and rebuilt.

Structures are tuples, lists, dicts, named tuples, whatever a library has registered with PyTorch's pytree (transformers
does so for its outputs), and any object that holds tensors and that `copy.copy` could take apart: dataclasses, attrs
classes, subclasses of dict and list, namespaces, objects with attributes. Everything else is a leaf: a tensor, None, a
number, a module, an object without tensors.

Containers that a function changes: it gets a copy of its arguments' structure, so the change has to be brought back.

returned    a container that the function changes and returns: the caller's gets the same parts
lost        one that it changes and does not return, which is refused, since nobody would see it
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from itertools import takewhile
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.common.torch_private import SUPPORTED_NODES

__all__ = [
    "ATOMS",
    "LEAF",
    "Containers",
    "IsWhole",
    "Shape",
    "bring_back",
    "flatten",
    "is_data",
    "is_opaque",
    "rebuild",
]


ATOMS = (
    bool, int, float, complex, str, bytes, range, slice, type, Enum, ModuleType, BuiltinFunctionType, nn.Module,
    np.ndarray, np.generic, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator,
)  # fmt: skip
"""Leaves that hold no tensors, or that stay as they are."""


@dataclass(frozen=True)
class Shape:
    """The structure that holds leaves; plain data.

    Attributes:
        kind: "leaf", or the class that holds the parts.
        names: the names of the parts, if they have names.
        parts: the Shape of each part.
        context: what is needed besides the parts to rebuild a registered class, or an object.
    """

    kind: Any
    parts: tuple[Shape, ...] = ()
    names: tuple[Any, ...] = ()
    context: Any = None


LEAF = Shape("leaf")
IsWhole = Callable[[Any], bool]


def flatten(value: Any, is_whole: IsWhole = lambda _: False) -> tuple[list[Any], Shape]:
    """Return the leaves of a value, in order, and the structure that holds them.

    Args:
        value: anything.
        is_whole: whether an object is a leaf, whatever it holds; tuples, lists and dicts never are.

    >>> leaves, shape = flatten(((1, None), {"a": [2]}))
    >>> leaves, rebuild(shape, [10, 20, 30])
    ([1, None, 2], ((10, 20), {'a': [30]}))
    >>> class Output(dict): ...
    >>> leaves, shape = flatten(Output(y=torch.ones(2)))
    >>> rebuild(shape, leaves)
    {'y': tensor([1., 1.])}
    """
    leaves: list[Any] = []
    return leaves, _take_apart(value, leaves.append, (), is_whole)


def _take_apart(
    value: Any, visit: Callable[[Any], None], within: tuple[Any, ...], is_whole: IsWhole
) -> Shape:
    """Visit the leaves of a value, which is inside of the structures `within`, and return its Shape."""
    kind = type(value)
    if isinstance(value, Tensor) or value is None or isinstance(value, ATOMS):
        visit(value)
        return LEAF
    if kind is tuple or kind is list:
        return Shape(kind, tuple([_take_apart(part, visit, within, is_whole) for part in value]))
    if kind is dict or kind is OrderedDict:
        return Shape(
            kind, tuple([_take_apart(part, visit, within, is_whole) for part in value.values()]), tuple(value)
        )
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return Shape(
            kind, tuple([_take_apart(part, visit, within, is_whole) for part in value]), kind._fields
        )
    if kind in SUPPORTED_NODES:
        inner, context = SUPPORTED_NODES[kind].flatten_fn(value)
        return Shape(
            kind, tuple([_take_apart(part, visit, within, is_whole) for part in inner]), context=context
        )
    if any(value is outer for outer in within):
        raise _Cycle
    reduced = None if is_whole(value) else _reduce(value)
    if reduced is not None:
        leaves: list[Any] = []
        make, parts = reduced
        try:
            shapes = tuple([_take_apart(part, leaves.append, (*within, value), is_whole) for part in parts])
        except _Cycle:
            if within:
                raise
            visit(value)
            return LEAF
        if is_dataclass(value) or any(isinstance(leaf, Tensor) for leaf in leaves):
            for leaf in leaves:
                visit(leaf)
            return Shape(kind, shapes, context=make)
    visit(value)
    return LEAF


class _Cycle(Exception):
    """Raised where an object contains itself, and so is a leaf as a whole."""


def _reduce(value: Any) -> tuple[Any, list[Any]] | None:
    """Return how to make an object of this kind, and its arguments, state, items and pairs; None if nobody can say."""
    if isinstance(
        value, (FunctionType, MethodType, Iterator)
    ):  # of an iterator, nobody knows what is to come
        return None
    try:
        reduced = value.__reduce_ex__(4)
    except (
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        pickle.PicklingError,
    ):  # it says that it cannot be
        return None
    if isinstance(reduced, str):
        return None
    function, args, state, items, pairs = (*reduced, *(None,) * 5)[:5]
    if state is value:
        state = _Cycle  # self.__dict__ = self, so that items are attributes too
    classes = list(takewhile(lambda arg: isinstance(arg, type), args))
    return (function, *classes), [list(args[len(classes) :]), state, list(items or ()), list(pairs or ())]


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
    if shape.names:
        return kind(*parts)
    return _make_again(shape.context, *parts)


def _make_again(
    make: tuple[Any, ...], args: list[Any], state: Any, items: list[Any], pairs: list[Any]
) -> Any:
    """Return an object as it was, as `copy.copy` does: neither its __init__ nor its __post_init__ runs again."""
    made = make[0](*make[1:], *args)
    if state is _Cycle:
        made.__dict__ = made
    elif state is not None and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state is not None:
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        if attributes:
            vars(made).update(attributes)
        for name, value in (slots or {}).items():
            object.__setattr__(made, name, value)
    for item in items:
        made.append(item)
    for key, value in pairs:
        made[key] = value
    return made


def is_data(value: Any) -> bool:
    """Return whether an object is there for what it holds, and not one that does something, such as a cache.

    >>> is_data(SimpleNamespace(x=1)), is_data(nn.Identity())
    (True, False)
    """
    if is_dataclass(value) or hasattr(type(value), "__attrs_attrs__"):
        return True
    return isinstance(value, (dict, list, tuple, set, frozenset, deque, SimpleNamespace))


def is_opaque(leaf: Any) -> bool:
    """Return whether a leaf may hold tensors that `flatten` does not find, as an iterator or a closure does.

    >>> is_opaque(len), is_opaque(3.0), is_opaque(x for x in [1])
    (False, False, True)
    """
    if isinstance(leaf, MethodType):
        return _holds_tensors((leaf.__self__, leaf.__func__))
    if isinstance(leaf, FunctionType):
        return _holds_tensors([cell.cell_contents for cell in leaf.__closure__ or () if _is_full(cell)])
    if leaf is None or isinstance(leaf, (Tensor, *ATOMS)):
        return False
    try:
        _take_apart(leaf, lambda _: None, (None,), lambda _: False)
    except _Cycle:
        return True
    return _reduce(leaf) is None


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) or is_opaque(leaf) for leaf in flatten(value)[0])


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


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

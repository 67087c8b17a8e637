"""Functions and classes that were put into libraries after these were imported: `nn.SiLU.forward = mine`.

    find     here: whatever is in a library's module or class and was not written there; most of it is what libraries
             take from each other
    apply    on a rank: what the library's own import did not put there

So nothing has to be known of a library, and nothing is compared that was not suspicious.
"""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["Patch", "find_patches", "is_installed"]

TORCH = (
    "torch.nn",
    "torch.optim",
    "torch.functional",
    "torch._tensor",
    "torch.autograd",
    "torch.utils.checkpoint",
)
"""torch's modules whose functions models and losses call."""

FUNCTIONS = "torch.nn.functional"

OTHERS = (*sys.stdlib_module_names, "mpkit", "numpy", "sympy", "torch", "typing_extensions")
"""Where libraries take decorators, named tuples and the like from; and what mpkit itself puts into torch."""

CONSTANTS = (bool, int, float, str)


@dataclass(frozen=True)
class Patch:
    """A value in a library's module or class.

    Attributes:
        module: the module's name.
        path: names of the attributes that lead to the value.
        value: what is there; in what is sent to ranks, pickled.
        home: the name of the module that it was written in; "" if nobody knows.
        users: whether it is the user's own, and so certainly a patch.
    """

    module: str
    path: tuple[str, ...]
    value: Any
    home: str
    users: bool

    def __str__(self) -> str:
        return ".".join((self.module, *self.path))

    def apply(self) -> None:
        """Put the pickled value where it is in the other process, unless the library did so itself.

        What an installed library adds for itself is left out where that library is not imported: that takes a second.
        """
        if self.module not in sys.modules and not self.users:
            return
        owner: Any = import_module(self.module)
        for name in self.path[:-1]:
            owner = vars(owner).get(name)
            if owner is None:
                return
        last = self.path[-1]
        if not (self.users or hasattr(owner, last) or self.home in {"", *sys.modules}):
            return
        value = pickle.loads(self.value)
        if _source_place(vars(owner).get(last)) != _source_place(value):
            setattr(owner, last, value)


def find_patches(modules: Collection[str] = ()) -> list[Patch]:
    """Return what may be patches: all in torch and in these modules; elsewhere only the user's own.

    Args:
        modules: those that define the model's classes.
    """
    found: list[Patch] = []
    program = sys.modules["__main__"]  # multiprocessing calls it __mp_main__ as well
    for name, module in list(sys.modules.items()):
        if module is program:
            continue
        if name == "torch" or name.startswith(TORCH) or name in modules:
            found += _in_module(name, module)
        elif name.partition(".")[0] not in OTHERS and getattr(module, "torch", None) is torch:
            found += (patch for patch in _in_module(name, module) if patch.users)
    return found


def _in_module(name: str, module: ModuleType) -> Iterator[Patch]:
    for key, value in list(vars(module).items()):
        inner = _function(value)
        if isinstance(value, type) and value.__module__ == name:
            yield from _in_class(name, value)
        elif isinstance(value, (type, FunctionType, BuiltinFunctionType, partial)) and (
            _is_foreign(name, inner) or (name == FUNCTIONS and getattr(inner, "__name__", key) != key)
        ):
            yield Patch(name, (key,), value, _home(inner), _is_users(name, inner))


def _in_class(name: str, kind: type) -> Iterator[Patch]:
    path = tuple(kind.__qualname__.split("."))
    for key, value in list(vars(kind).items()):
        inner = _function(value)
        if isinstance(inner, (FunctionType, BuiltinFunctionType)):
            other = key == "forward" and inner.__qualname__ != f"{kind.__qualname__}.forward"
            if other or (type(inner) is FunctionType and _is_foreign(name, inner)):
                yield Patch(name, (*path, key), value, _home(inner), _is_users(name, inner))
        elif type(value) in CONSTANTS and not key.startswith("_") and issubclass(kind, nn.Module):
            yield Patch(name, (*path, key), value, "", False)


def _function(value: Any) -> Any:
    """Return the function in a method, a property or a partial."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, partial):
        value = value.func
    return value


def _home(value: Any) -> str:
    """Return the name of the module in which a function or a class was written."""
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", ""))
    return str(getattr(value, "__module__", None) or "")


def _is_foreign(module: str, value: Any) -> bool:
    home = _home(value).partition(".")[0]
    if home == "__main__":
        return True
    return home not in (module.partition(".")[0], "", *OTHERS) and not home.startswith("namedtuple_")


def _is_users(module: str, value: Any) -> bool:
    """Return whether the user wrote what is in a library; or, in a notebook, what is in a module of the user's own."""
    home = _home(value)
    if home == "__main__":
        return module != "__main__"
    if not home or home.partition(".")[0] in OTHERS:
        return False
    return is_installed(module) and not is_installed(home)


def is_installed(module: str) -> bool:
    """Return whether a module is Python's or an installed package's, and not the user's own."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(_installed_files())


@cache
def _installed_files() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")})


def _source_place(value: Any) -> Any:
    """Return where something was written: equal for what two processes import from the same file."""
    inner = _function(value)
    if isinstance(inner, FunctionType):
        return _home(inner), inner.__qualname__, inner.__code__.co_code
    if isinstance(inner, (type, BuiltinFunctionType)):
        return _home(inner), inner.__qualname__
    return value

"""The user's own modules that were edited since this process imported them: ranks import the files as they are now.

The installed modules that define a model do not change while a notebook is open.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from torch import nn

__all__ = ["edited_functions", "installed_modules", "is_installed"]


def edited_functions(names: Iterable[str | None]) -> list[str]:
    """Return the functions of these modules that are not what the modules' files say now."""
    found: list[str] = []
    for name in sorted(name for name in names if name):  # functions of exec() may have none
        module = sys.modules.get(name)
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        if module is None or type(loader) is not SourceFileLoader or name.partition(".")[0] == "mpkit":
            continue
        if name != "__main__" and not is_installed(name):
            found += (f"{name}.{function}" for function in _edited_functions(module, Path(loader.path)))
    return found


def _edited_functions(module: ModuleType, file: Path) -> Iterator[str]:
    try:
        now = dict(_codes(compile(file.read_bytes(), str(file), "exec", dont_inherit=True)))
    except (OSError, SyntaxError, ValueError):
        return  # the rank's import says so
    for function in _functions(module):
        code = function.__code__
        if code.co_filename == str(file) and "<locals>" not in code.co_qualname:
            other = now.get(code.co_qualname)
            if other is None or _content(other) != _content(code):
                yield code.co_qualname


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for value in list(vars(module).values()):
        if isinstance(value, FunctionType):
            yield value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for inner in list(vars(value).values()):
                if isinstance(inner, (staticmethod, classmethod)):
                    inner = inner.__func__
                if isinstance(inner, FunctionType):
                    yield inner


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)


def _content(code: CodeType) -> object:
    """Return what a function does, wherever in its file it is."""
    parts = [_content(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, code.co_names, parts


def is_installed(module: str) -> bool:
    """Return whether a module is Python's or an installed package's, and not the user's own."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(_installed_files())


@cache
def _installed_files() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")})


WARM = ("torch", "mpkit")
"""Packages that ranks have imported anyway."""


def installed_modules(model: nn.Module | None) -> list[str]:
    """Return the Python modules that define the model's classes, if they are installed and not the user's own files.

    >>> installed_modules(nn.Linear(2, 3))  # torch's are there already
    []
    """
    if model is None:
        return []
    places = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [name for name in names if name.partition(".")[0] not in WARM and _is_within(name, places)]


def _is_within(name: str, places: set[Path]) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and not places.isdisjoint(Path(file).resolve().parents)

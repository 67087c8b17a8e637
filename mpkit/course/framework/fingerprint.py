"""Whether two answers are the same program: what they do, without comments, layout and docstrings.

A notebook packs a function with its file's name and line numbers, which change whenever its cell is run again. So an
answer is reduced to its instructions and constants, and those of the student's own functions, classes and data that it
uses.
"""

from __future__ import annotations

import hashlib
import sys
from types import CodeType, FunctionType
from typing import Any

import cloudpickle

__all__ = ["fingerprint"]

UNSAID = {
    "__dict__", "__doc__", "__firstlineno__", "__module__", "__static_attributes__", "__weakref__", "__annotations__",
    "__annotate__", "__annotations_cache__", "__annotate_func__", "__qualname__",
}  # fmt: skip

HAS_DOCSTRING = 0x4000000
"""The flag of code whose first constant is its docstring, from Python 3.13 on."""


def fingerprint(answer: Any) -> str:
    """Return a short text that is the same for answers that are the same program.

    >>> fingerprint(lambda p, m: p + m) == fingerprint(lambda p, m: p + m)
    True
    >>> fingerprint(lambda p, m: p + m) == fingerprint(lambda p, m: p - m)
    False
    """
    return hashlib.sha256(repr(_describe_value(answer, set())).encode()).hexdigest()[:16]


def _describe_value(value: Any, known: set[int]) -> object:
    """Return what a value says, as nested tuples; a function or class that was met before is said once."""
    if id(value) in known:
        return "again"
    if isinstance(value, list | tuple | dict):
        known = known | {
            id(value)
        }  # only within itself: what is met beside it can be another one at its address
    elif isinstance(value, FunctionType | type):
        known.add(id(value))
    if isinstance(value, FunctionType):
        return _function(value, known)
    if isinstance(value, type):
        if value.__module__ != "__main__":
            return value.__module__, value.__qualname__
        bases = [_describe_value(base, known) for base in value.__bases__]
        return bases, [
            (name, _describe_value(each, known)) for name, each in vars(value).items() if name not in UNSAID
        ]
    if isinstance(value, staticmethod | classmethod):
        return _describe_value(value.__func__, known)
    if isinstance(value, property):
        return [_describe_value(each, known) for each in (value.fget, value.fset, value.fdel)]
    if isinstance(value, list | tuple):
        return [_describe_value(each, known) for each in value]
    if isinstance(value, dict):
        return [(repr(key), _describe_value(each, known)) for key, each in value.items()]
    if isinstance(value, str | bytes | int | float | bool | None | type(...)):
        return repr(value)
    return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()


def _function(function: FunctionType, known: set[int]) -> object:
    code = function.__code__
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(_describe_value(cell.cell_contents, known))
        except ValueError:  # not assigned yet
            cells.append("empty")
    used = {name: function.__globals__[name] for name in _names(code) if name in function.__globals__}
    own = [(name, _describe_value(value, known)) for name, value in used.items() if _is_own(value)]
    defaults = (
        _describe_value(function.__defaults__ or (), known),
        _describe_value(function.__kwdefaults__ or {}, known),
    )
    return _code(code), defaults, cells, own


def _is_own(value: Any) -> bool:
    """Return whether a global is the student's: a function or class of a cell, or plain data."""
    if isinstance(value, FunctionType | type):
        return value.__module__ == "__main__"
    return isinstance(value, str | int | float | bool | list | tuple | dict)


def _code(code: CodeType) -> object:
    documented = (
        code.co_flags & HAS_DOCSTRING if sys.version_info >= (3, 13) else not code.co_name.startswith("<")
    )
    constants = [
        _code(each) if isinstance(each, CodeType) else repr(each)
        for place, each in enumerate(code.co_consts)
        if not (place == 0 and documented and isinstance(each, str))
    ]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars


def _names(code: CodeType) -> list[str]:
    """Return the global names that a function's code uses, those of functions inside it included."""
    inside = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return sorted({*code.co_names, *inside})

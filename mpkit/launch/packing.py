"""What goes to ranks as bytes, and back: cloudpickle, and what it leaves behind in the modules of libraries.

    functions within functions of installed packages
        cloudpickle sends such a function with copies of the globals that it uses. There it looks at the copies, and the
        package at the originals; and some globals cannot be copied (a ContextVar). So it is sent as code that belongs
        to its module: transformers hangs such functions onto models whose hidden states are asked for.
    models of transformers
        Making one notes in the package what can be asked of its class; on a rank nobody makes it.
    parametrized modules
        See `mpkit.launch.parametrized`.

Classes and functions of notebooks and scripts go by value, as ever.
"""

from __future__ import annotations

import io
import sys
import sysconfig
from importlib import import_module
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import cloudpickle

from mpkit.launch.parametrized import taken_apart

__all__ = ["dumps"]

ATTRIBUTES = (
    "__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__", "__annotations__",
)  # fmt: skip
RECORDS = "transformers.utils.output_capturing"
"""The module in which transformers notes which outputs the models of a class can record."""


def dumps(value: object) -> bytes:
    """As `cloudpickle.dumps`; `pickle.loads` reads it."""
    file = io.BytesIO()
    _Packer(file).dump(value)
    return file.getvalue()


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle for every object that is no plain value."""
        if isinstance(obj, FunctionType) and _is_nested(obj):
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            attributes = {name: getattr(obj, name) for name in ATTRIBUTES}
            state = (cells, attributes, obj.__dict__)
            return _function, (obj.__globals__["__name__"], obj.__code__), state, None, None, _complete
        parts = taken_apart(obj)
        if parts is not None:
            return parts
        if getattr(type(obj), "_can_record_outputs", None) and RECORDS in sys.modules:
            make, args, state, *_ = obj.__reduce_ex__(4)
            return make, args, state, None, None, _complete_model
        return super().reducer_override(obj)


def _is_nested(function: FunctionType) -> bool:
    """Whether it was made by a function of an installed package, so that nobody can look it up."""
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    file = getattr(module, "__file__", None)
    if "<locals>" not in function.__qualname__ or file is None or vars(module) is not function.__globals__:
        return False
    installed = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    return any(folder in Path(file).parents for folder in installed)


def _function(module: str, code: CodeType) -> FunctionType:
    cells = tuple(CellType() for _ in code.co_freevars)
    return FunctionType(code, vars(import_module(module)), closure=cells)


def _complete(function: FunctionType, state: tuple[list[Any], dict[str, Any], dict[str, Any]]) -> None:
    contents, attributes, own = state
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        cell.cell_contents = content
    for name, value in attributes.items():
        setattr(function, name, value)
    function.__dict__.update(own)


def _complete_model(model: Any, state: dict[str, Any]) -> None:
    model.__setstate__(state)
    registry = getattr(import_module(RECORDS), "_CAN_RECORD_REGISTRY", None)
    if registry is not None:
        registry[model] = type(model)._can_record_outputs

"""The state of a process that its pickled objects do not carry: settings, patches of libraries, edited modules.

Ranks are fresh processes that import code from its files. So a notebook that has set a default dtype would train
something else on ranks than in its own loop.

    settings    default dtype, precision of matrix products, deterministic algorithms, ...: ranks get them (`SETTINGS`)
    patches     the user's own functions and classes in torch's layers and functions, or in the modules that define
                the model's classes (`nn.SiLU.forward = mine`): a warning names them, and ranks do without
    edits       of the user's own modules since this process imported them: ranks import the files as they are now
"""

import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.backends import cuda, cudnn, mha

from mpkit.common.exceptions import report


def edited_functions(names: Iterable[str | None]) -> list[str]:
    """Return the functions of these modules that differ from the modules' files."""
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
        return  # the rank's import will fail with it
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
    """Return a function's code without its place in the file."""
    parts = [_content(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, code.co_names, parts


def is_installed(module: str) -> bool:
    """Return whether a module is Python's or an installed package's, and not the user's own."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(_installed_files())


@cache
def _installed_files() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")})


def installed_modules(model: nn.Module | None) -> list[str]:
    """Return the installed modules that define the model's classes, without torch's and mpkit's, which ranks have."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules()) if model is not None else ()
    return [name for name in names if name.partition(".")[0] not in ("torch", "mpkit") and is_installed(name)]


Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]


def _flag(owner: Any, name: str) -> Setting:
    return partial(getattr, owner, name), partial(setattr, owner, name)


LIBRARIES = {*sys.stdlib_module_names, "torch", "mpkit"}

SETTINGS: dict[str, Setting] = {
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.use_deterministic_algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "torch.autograd.set_detect_anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch.backends.cudnn.benchmark": _flag(cudnn, "benchmark"),
    "torch.backends.cudnn.deterministic": _flag(cudnn, "deterministic"),
    "torch.backends.cuda.enable_flash_sdp": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "torch.backends.cuda.enable_mem_efficient_sdp": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "torch.backends.cuda.enable_math_sdp": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "torch.backends.mha.set_fastpath_enabled": (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    "numpy.seterr": (np.geterr, lambda value: np.seterr(**value)),
    "sys.setrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
}  # fmt: skip
"""The functions that read and set each setting."""


def pack_world() -> bytes:
    """Pickle this process's settings."""
    return pickle.dumps({name: read() for name, (read, _) in SETTINGS.items()})


def report_what_stays(modules: Collection[str] = ()) -> None:
    """Report changes of this process that ranks will not have; `modules` define the model's classes."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        report(
            "torch.autocast is on here and not on the ranks: mk.Plan(..., precision='bf16') trains in 16 bits."
        )
    if patches := sorted(_users_patches(modules)):
        report(
            f"Ranks run {', '.join(patches[:5])} as the library has it, and not what this process has put in its "
            "place: they import the library anew. Make it a module of the model's own, such as class MySiLU(nn.Module)"
        )


def enter_world(settings: dict[str, Any]) -> None:
    """Give a rank's process the settings of the process that launched it."""
    for name, value in settings.items():
        read, write = SETTINGS[name]
        if read() != value:
            write(value)


def _users_patches(modules: Collection[str]) -> Iterator[str]:
    """Yield the names of the user's functions and classes in libraries."""
    layers = (name for name in list(sys.modules) if name.startswith("torch.nn.modules."))
    for name in ("torch.nn", "torch.nn.functional", *layers, *(sys.modules.keys() & set(modules))):
        own = vars(sys.modules[name])
        for key, value in list(own.items()):
            if isinstance(value, type) and value.__module__ == name:
                inner = (f"{key}.{each}" for each, held in list(vars(value).items()) if _is_users(held, own))
                yield from (f"{name}.{each}" for each in inner)
            elif _is_users(value, own):
                yield f"{name}.{key}"


def _is_users(value: Any, own: dict[str, Any]) -> bool:
    """Return whether a value in a library's module, whose names are `own`, comes from the user's code."""
    if isinstance(value, FunctionType) and value.__globals__ is own:  # the common case, first for speed
        return False
    if not isinstance(value, (FunctionType, type)):
        value = getattr(value, "__func__", None)  # of a class method
        if not isinstance(value, FunctionType):
            return False
    home = value.__globals__.get("__name__") if isinstance(value, FunctionType) else value.__module__
    if home == "__main__":
        return True
    top = str(home).partition(".")[0]
    return home in sys.modules and not (top in LIBRARIES or is_installed(home))

"""What a process has changed for all of its code: settings of torch and NumPy go to the ranks, patches are named.

Ranks are fresh processes, and code that is imported there is what its files say. So a notebook that has set a default
dtype would train something else on ranks than in its own loop.

    settings    default dtype, precision of matrix products, deterministic algorithms, and so on: `SETTINGS`
    patches     the user's own functions and classes in torch's layers and functions, or in the modules that define
                the model's classes (`nn.SiLU.forward = mine`): a warning names them, and ranks do without
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
import torch

from mpkit.common.exceptions import report
from mpkit.strategies.packing.edited_modules import is_installed
from mpkit.strategies.packing.packing import dumps

__all__ = ["enter_world", "pack_world"]

Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _flag(owner: Any, name: str) -> Setting:
    return partial(getattr, owner, name), partial(setattr, owner, name)


LIBRARIES = {*sys.stdlib_module_names, "torch", "mpkit"}

SETTINGS: dict[str, Setting] = {
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision,
    ),
    "torch.use_deterministic_algorithms": (_deterministic, _set_deterministic),
    "torch.autograd.set_detect_anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch.backends.cudnn.benchmark": _flag(torch.backends.cudnn, "benchmark"),
    "torch.backends.cudnn.deterministic": _flag(torch.backends.cudnn, "deterministic"),
    "torch.backends.cuda.enable_flash_sdp": (
        torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp,
    ),
    "torch.backends.cuda.enable_mem_efficient_sdp": (
        torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "torch.backends.cuda.enable_math_sdp": (
        torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp,
    ),
    "torch.backends.mha.set_fastpath_enabled": (
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled,
    ),
    "numpy.seterr": (np.geterr, lambda value: np.seterr(**value)),
    "sys.setrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
}  # fmt: skip
"""How each setting is read, and set."""


def pack_world(modules: Collection[str] = ()) -> bytes:
    """Pickle this process's settings; report what ranks will not have.

    Args:
        modules: the modules that define the model's classes.
    """
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        report(
            "torch.autocast is on here and not on the ranks: mk.Plan(..., precision='bf16') trains in 16 bits."
        )
    if patches := sorted(_users_patches(modules)):
        report(
            f"Ranks run {', '.join(patches[:5])} as the library has it, and not what this process has put in its "
            "place: they import the library anew. Make it a module of the model's own, such as class MySiLU(nn.Module)"
        )
    return dumps({name: read() for name, (read, _) in SETTINGS.items()})


def enter_world(settings: dict[str, Any]) -> None:
    """Give a rank's process the settings of the process that launched it."""
    for name, value in settings.items():
        read, write = SETTINGS[name]
        if read() != value:
            write(value)


def _users_patches(modules: Collection[str]) -> Iterator[str]:
    """Yield the names of the user's functions and classes in libraries."""
    layers = (name for name in list(sys.modules) if name.startswith("torch.nn.modules."))
    for name in ("torch.nn", "torch.nn.functional", *layers, *modules):
        for key, value in list(vars(sys.modules[name]).items()):
            if isinstance(value, type) and value.__module__ == name:
                inner = (f"{key}.{each}" for each, held in list(vars(value).items()) if _is_users(held))
                yield from (f"{name}.{each}" for each in inner)
            elif _is_users(value):
                yield f"{name}.{key}"


def _is_users(value: Any) -> bool:
    if not isinstance(value, (FunctionType, type)):
        value = getattr(value, "__func__", None)  # of a class method
        if not isinstance(value, FunctionType):
            return False
    home = value.__globals__.get("__name__") if isinstance(value, FunctionType) else value.__module__
    if home == "__main__":
        return True
    top = str(home).partition(".")[0]
    return home in sys.modules and not (top in LIBRARIES or is_installed(home))

"""What a process has changed for all of its code, carried to the ranks: settings of torch, and patched libraries.

Ranks are fresh processes, and code that is imported there is what its files say. So a notebook that has set a default
dtype, or put a method of its own into a class of a library, would train something else on ranks than in its own loop.

    settings    default dtype, precision of matrix products, deterministic algorithms, and so on: `SETTINGS`
    patches     functions and classes that were put into libraries (`mpkit.strategies.packing.patches`)

What cannot be carried is reported by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from mpkit.common.exceptions import one_line, report
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.packing.patches import Patch, find_patches

__all__ = ["World", "pack_world"]

Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _flag(owner: Any, name: str) -> Setting:
    return partial(getattr, owner, name), partial(setattr, owner, name)


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


@dataclass(frozen=True)
class World:
    """A process's settings and patches.

    Attributes:
        settings: the values of `SETTINGS`.
        patches: the patches, their values pickled.
    """

    settings: dict[str, Any]
    patches: list[Patch]

    def enter(self) -> None:
        """Make a rank's process the same."""
        for name, value in self.settings.items():
            read, write = SETTINGS[name]
            if read() != value:
                write(value)
        for patch in self.patches:
            patch.apply()


def pack_world(modules: Collection[str] = ()) -> bytes:
    """Pickle what this process has changed; report patches that cannot be sent.

    Args:
        modules: the modules that define the model's classes.
    """
    settings = {name: read() for name, (read, _) in SETTINGS.items()}
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        report(
            "torch.autocast is on here and not on the ranks: mk.Plan(..., precision='bf16') trains in 16 bits."
        )
    patches, lost = [], []
    for patch in find_patches(modules):
        try:
            patches.append(replace(patch, value=dumps(patch.value)))
        except Exception as error:  # a closure may hold anything
            lost.append(f"{patch} ({one_line(error)})")
    if lost:
        report(
            f"Ranks run {', '.join(lost)} as the library has it, and not what this process has put in its place, since "
            "that cannot be sent to other processes."
        )
    return dumps(World(settings, patches))

"""The installed modules that define a model, which do not change while a notebook is open."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from torch import nn

__all__ = ["installed_modules"]

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

"""Options of an optimizer as data that can be compared."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """Convert a value into comparable data: numbers, strings, and tensors as lists.

    >>> import torch
    >>> plain({"lr": torch.tensor(0.5), "betas": (0.9, 0.99)})
    {'lr': 0.5, 'betas': [0.9, 0.99]}
    """
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= 64 else (tuple(value.shape), float(value.double().sum()))
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__

"""Data in which some targets do not count, because they are ignored by value, masked, or weighted.

A loss may be correct for the first samples and wrong for other data. So it is tried on changed data too, and if it is
wrong there, the training data is inspected: a list here and now, and batches that are loaded later on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpkit.strategies.data.microbatch import Value, leaves, map_tensors
from mpkit.strategies.loss.guard import Masked

__all__ = ["MaskedData", "variants"]

IGNORED = (-100, -1, 0)
"""Customary values of padded targets."""


@dataclass(frozen=True)
class MaskedData:
    """The data with one tensor changed.

    Attributes:
        data: inputs and targets.
        masked: which tensor was changed, and how to recognize such data.
    """

    data: tuple[Value, Value]
    masked: Masked


def variants(loss: Any, data: tuple[Value, Value]) -> Iterator[MaskedData]:
    """Yield the changes that a loss, or a model that computes its loss itself, could treat as masks."""
    own = getattr(loss, "ignore_index", None)
    numbers = dict.fromkeys((*([own] if isinstance(own, int) else []), *IGNORED))
    for side, value in enumerate(data):
        names = list(value) if isinstance(value, dict) else [None] * len(leaves(value))
        for place, (name, leaf) in enumerate(zip(names, leaves(value), strict=True)):
            called = str(name or "").lower()
            labels = side == 1 or "label" in called or "target" in called
            if leaf.dtype == torch.bool and (labels or "mask" in called):
                yield MaskedData(_change_leaf(data, side, place, _zero_uneven), Masked(side, place, None))
            elif leaf.is_floating_point() and labels:
                yield MaskedData(_change_leaf(data, side, place, _weight_samples), Masked(side, place, None))
                yield MaskedData(_change_leaf(data, side, place, _zero_uneven), Masked(side, place, None))
            elif labels and not leaf.is_floating_point() and not leaf.is_complex():
                for number in numbers:
                    changed = _change_leaf(data, side, place, partial(_fill_uneven, number=number))
                    yield MaskedData(changed, Masked(side, place, number))
            elif "mask" in called and side == 0:
                yield MaskedData(_change_leaf(data, side, place, _zero_uneven), Masked(side, place, None))


def _change_leaf(
    data: tuple[Value, Value], side: int, place: int, change: Callable[[Tensor], Tensor]
) -> tuple[Value, Value]:
    number = iter(range(len(leaves(data[side]))))
    value = map_tensors(lambda t: change(t) if next(number) == place else t, data[side])
    return (value, data[1]) if side == 0 else (data[0], value)


def _uneven_mask(tensor: Tensor) -> Tensor:
    """Return a mask with a different share of each sample: none of the first, and more of each next, but never all."""
    samples, width = tensor.shape[0], tensor[0].numel()
    if width == 1:
        return (torch.arange(samples) % 3 == 1).view(tensor.shape)
    hidden = (torch.arange(samples) * width) // (samples + 1)
    return (torch.arange(width)[None] < hidden[:, None]).view(tensor.shape)


def _fill_uneven(tensor: Tensor, *, number: int) -> Tensor:
    return tensor.masked_fill(_uneven_mask(tensor), number)


def _zero_uneven(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(_uneven_mask(tensor), 0)


def _weight_samples(tensor: Tensor) -> Tensor:
    factors = 1 + torch.arange(tensor.shape[0], dtype=tensor.dtype) / 2
    return tensor * factors.view(-1, *[1] * (tensor.dim() - 1))

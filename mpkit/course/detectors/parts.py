"""The parts of results: tensors, numbers and lists in dicts and lists, right and wrong ones side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpkit.course.framework.equal import is_tensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Part", "name_of", "numbers_of", "parts_of"]


@dataclass(frozen=True)
class Part:
    """A part of a rank's results, such as one tensor of a dict, that is wrong."""

    rank: int
    at: str
    expected: Any
    got: Any


def parts_of(rank: int, at: str, expected: Any, got: Any) -> Iterator[Part]:
    """Yield the parts of a result: the values of dicts and lists that have the same form, or the whole."""
    if isinstance(expected, dict) and isinstance(got, dict) and expected.keys() == got.keys():
        for key, each in expected.items():
            yield from parts_of(rank, f"{at}[{key!r}]" if at else str(key), each, got[key])
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple) and len(expected) == len(got):
        if expected and all(isinstance(each, dict | list | tuple) or is_tensor(each) for each in expected):
            for i, each in enumerate(expected):
                yield from parts_of(rank, f"{at}[{i}]", each, got[i])
        else:
            yield Part(rank, at, expected, got)
    else:
        yield Part(rank, at, expected, got)


def _flat(value: Any) -> Tensor | None:
    """Return a part's numbers, float64; None if it is something else."""
    import torch

    if is_tensor(value):
        return value.detach().to(torch.float64)
    if isinstance(value, bool) or value is None or isinstance(value, str | dict):
        return None
    try:
        return torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError):
        return None


def numbers_of(part: Part) -> tuple[Tensor, Tensor] | None:
    """Return the expected numbers and the answer's, float64; None if one of them is no tensor, number or list."""
    expected, got = _flat(part.expected), _flat(part.got)
    return None if expected is None or got is None else (expected, got)


def name_of(parts: Sequence[Part]) -> str:
    """Return what is wrong, in words: the name of the part if there is one part only."""
    names = {part.at for part in parts}
    return names.pop() or "What you got" if len(names) == 1 else "What is wrong"

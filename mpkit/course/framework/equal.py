"""Comparing two results: whether they are equal, and if not, where they differ, in words."""

from __future__ import annotations

import math
import sys
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor


WHOLE = 100
"""So many items of a list are shown where a result is shown whole."""

RTOL, ATOL = 1e-4, 1e-6
"""The kit's tolerances for fp32, and for plain numbers."""

RTOL_64, ATOL_64 = 1e-10, 1e-12
"""The tolerances of a float64 tensor where one is expected: what went through fp32 on its way is off by more. An
exercise that leaves a choice within fp32's digits, such as clipping's 1e-6 in the divisor, expects fp32."""

FP32 = "torch.zeros(k) is fp32, which a dtype=x.dtype changes"
"""Where digits go that nobody wanted to lose."""


def difference(expected: Any, got: Any, at: str = "") -> str | None:
    """Return where `got` differs from `expected`, in words; None if it does not.

    >>> import torch
    >>> difference([torch.ones(2), 3], [torch.ones(2), 4])
    '[1] is 4, not 3'
    >>> difference({"losses": [0.5, 0.4], "w.0": 1}, {"losses": [0.5, 0.3], "w.0": 1})
    'losses[1] is 0.3, not 0.4'
    >>> difference(3.7, 3)
    'it is 3, not 3.7'
    >>> difference(torch.zeros(2), torch.zeros(3))
    'it has shape [3], not [2]'
    >>> difference({"w": 1.0}, {"w": 1.0 + 1e-9}) is None
    True

    A float64 tensor has to be as exact as float64 is:

    >>> difference(torch.tensor([0.1, 0.5], dtype=torch.float64), torch.tensor([0.1, 0.5]).double())
    "[0] is right to fp32's digits only, not to float64's (1 of 2 are wrong): torch.zeros(k) is fp32, which a \
dtype=x.dtype changes"
    """
    it = at or "it"
    if is_tensor(expected):
        return _tensors(expected, got, it)
    if isinstance(expected, bool) or not isinstance(expected, Number | list | tuple | dict):
        same = type(got) is type(expected) and got == expected
        return None if same else f"{it} is {spell(got)}, not {spell(expected)}"
    if isinstance(expected, Number):
        if is_tensor(got) and got.numel() == 1:
            got = got.item()
        if isinstance(got, bool) or not isinstance(got, Number):
            return f"{it} is {spell(got)}, not {spell(expected)}"
        exact = isinstance(expected, int) and isinstance(got, int)
        same = got == expected or (not exact and _is_near(expected, got))
        return None if same else f"{it} is {spell(got)}, not {spell(expected)}"
    kind = dict if isinstance(expected, dict) else (list, tuple)
    if not isinstance(got, kind):
        return f"{it} is {spell(got)}, not {'a dict' if kind is dict else 'a list'}"
    if isinstance(expected, dict):
        faults = [f"lacks {key!r}" for key in expected if key not in got][:1]
        faults += [f"has {key!r} too many" for key in got if key not in expected][:1]
        if faults:
            return f"{it} " + " and ".join(faults)
        # "losses[1]", not "['losses'][1]": most results are a dict of lists
        named = {key: key if not at and str(key).isidentifier() else f"{at}[{key!r}]" for key in expected}
        pairs = [(named[key], expected[key], got[key]) for key in expected]
    else:
        if len(expected) != len(got):
            return f"{it} has {len(got)} items, not {len(expected)}"
        pairs = [(f"{at}[{i}]", each, got[i]) for i, each in enumerate(expected)]
    return next((said for place, a, b in pairs if (said := difference(a, b, place))), None)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor; there is none before torch is imported.

    >>> is_tensor(1.0)
    False
    """
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _is_near(expected: Any, got: Any) -> bool:
    return bool(abs(got - expected) <= ATOL + RTOL * abs(expected) < math.inf)


def _tensors(expected: Tensor, got: Any, it: str) -> str | None:
    import torch

    if not is_tensor(got):
        return f"{it} is {spell(got)}, not a tensor"
    if got.shape != expected.shape:
        return f"{it} has shape {list(got.shape)}, not {list(expected.shape)}"
    a, b = expected.detach().to(torch.float64), got.detach().to(torch.float64)
    wrong = ~torch.isclose(b, a, RTOL, ATOL, equal_nan=True)
    rounded = False
    if expected.dtype == got.dtype == torch.float64 and not bool(wrong.any()):
        wrong, rounded = ~torch.isclose(b, a, RTOL_64, ATOL_64, equal_nan=True), True
    if not bool(wrong.any()):
        return None
    place = wrong.nonzero()[0].tolist()
    index = f"[{', '.join(map(str, place))}]" if place else ""
    which = f"{'' if it == 'it' else it}{index}" or it
    many = f" ({int(wrong.sum())} of {a.numel()} are wrong)" if a.numel() > 1 else ""
    if rounded:
        return f"{which} is right to fp32's digits only, not to float64's{many}: {FP32}"
    return f"{which} is {b[tuple(place)].item():.5g}, not {a[tuple(place)].item():.5g}{many}"


def spell(value: Any, most: int = 4) -> str:
    """Return a result in a few words, with `most` items of each list; `most=100` shows all that a cell can hold.

    >>> import torch
    >>> spell(torch.arange(6.0)), spell([1, 2, 3, 4, 5, 6]), spell(None)
    ('[0, 1, 2, 3, ...]', '[1, 2, 3, 4, ...]', 'None')
    >>> spell([1, 2, 3, 4, 5, 6], most=100)
    '[1, 2, 3, 4, 5, 6]'
    """
    longest = 60 if most < WHOLE else 1000
    if is_tensor(value):
        flat = value.detach().flatten()
        first = ", ".join(f"{each:.4g}" for each in flat[:most].tolist())
        shape = f" of shape {list(value.shape)}" if value.dim() > 1 else ""
        return (
            f"[{first}{', ...' if flat.numel() > most else ''}]{shape}"
            if value.dim()
            else f"{value.item():.5g}"
        )
    if isinstance(value, list | tuple):
        inside = ", ".join(spell(each, most) for each in value[:most])
        return _cut(f"[{inside}{', ...' if len(value) > most else ''}]", longest)
    if isinstance(value, dict):
        pairs = list(value.items())
        inside = ", ".join(f"{key}: {spell(each, most)}" for key, each in pairs[:most])
        return _cut(f"{{{inside}{', ...' if len(pairs) > most else ''}}}", longest)
    return _cut(f"{value:.5g}" if isinstance(value, float) else repr(value), longest)


def _cut(text: str, longest: int) -> str:
    """Shorten a text to what fits into a table's cell."""
    return text if len(text) < longest else text[: longest - 3] + "..."

"""The cost of one operator: FLOPs by torch's formulas, bytes by its arguments and results.

Dispatch modes use this for every operator: `flops.count` on tensors without data, simulated ranks, and traced models.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, shape_wrapper

from mpkit.common import torch_private
from mpkit.common.torch_private import _grouped_mm, _unsafe_view

_ATEN = torch.ops.aten
_MOVES_NOTHING = {_unsafe_view, _ATEN.empty, _ATEN.empty_like, _ATEN.new_empty, _ATEN.new_empty_strided}
"""Operators that move nothing, besides declared views."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments or results, which nest in tuples, lists and dicts only.

    torch's own tree_leaves knows more kinds of trees, but takes ten times as long for every operator.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def moved_by(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operator reads and writes: all its arguments and results, unless it is a view."""
    if func.is_view or func.namespace in ("prim", "c10d") or func.overloadpacket in _MOVES_NOTHING:
        return 0
    return sum(value.nbytes for value in tensors_in((args, kwargs, out)))


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of an operator; 0 for all but matrix products, convolutions and attention.

    A causal fused attention computes only the attended scores, about half of those that torch's formulas count.
    """
    formula = _FORMULAS.get(func.overloadpacket)
    if formula is None:
        return 0.0
    flops = float(formula(*args, **kwargs, out_val=out))
    return flops * _attended_share(func, args, kwargs) if func.overloadpacket in _ATTENTION else flops


def _attended_share(func: Any, args: Any, kwargs: Any) -> float:
    """Return the share of all pairs of a query and a key that an attention computes."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if not given.get("is_causal"):
        return 1.0
    queries, keys = given["query"].shape[2], given["key"].shape[2]
    n = min(queries, keys)
    return float((n * (n + 1) / 2 + (queries - n) * keys) / max(queries * keys, 1))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of attention, shapes [b, h, s, d]: q kT and a v, for each head of the queries."""
    b, h, s, d = query
    return int(2 * b * h * s * key[2] * (d + value[3]))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of its backward: q kT again, then the gradients of v and a, and of k and q."""
    b, h, s, d = query
    return int(2 * b * h * s * key[2] * (3 * d + 2 * value[3]))


def _grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped product: each row of a meets one matrix of b, whatever the groups are."""
    matrices = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    return int(2 * matrices * a.shape[-2] * a.shape[-1] * b.shape[-1])


# torch has no formula for the CPU's kernel, and before 2.13 none for queries with more heads than keys.
_KERNELS = ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")
_ATTENTION = {
    getattr(torch_private, f"_scaled_dot_product_{kernel}{suffix}"): formula
    for kernel in _KERNELS
    for suffix, formula in (("", _attention), ("_backward", _attention_backward))
}
_FORMULAS = {
    **flop_registry,
    **{op: shape_wrapper(f) for op, f in _ATTENTION.items()},
    _grouped_mm: _grouped_flops,
}

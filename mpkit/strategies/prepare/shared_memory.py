"""Rejects tensors of a model that share memory although they are different tensors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor, nn

from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.prepare.arguments.task import Rejection, Task

__all__ = ["check_shared_memory", "find_overlap", "find_shared_memory"]

Key = TypeVar("Key", str, int)


def check_shared_memory(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject trained parameters whose memory another parameter or a buffer sees: a rank's copies would be separate."""
    return find_shared_memory(task.given_model)


def find_shared_memory(model: nn.Module) -> Rejection | None:
    """Reject a trained parameter that changes, in plain PyTorch, whenever another tensor of the model does.

    Copies of a model keep parameters that are one object, and make two tensors of two objects in the same memory.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = nn.Parameter(model[0].weight.data.t())
    >>> str(find_shared_memory(model)).split(":")[0]
    '1.weight and 0.weight of the model are different tensors in the same memory'
    """
    named = dict((*model.named_parameters(), *model.named_buffers()))
    pair = find_overlap(named)
    return pair and _rejection(pair[0], named[pair[0]], pair[1], named[pair[1]])


def find_overlap(named: Mapping[Key, Tensor]) -> tuple[Key, Key] | None:
    """Return the names of two tensors, one of them trained, that share an element; None if no two do.

    >>> flat = torch.zeros(8, requires_grad=True)
    >>> find_overlap({"a": flat[:4], "b": flat[4:]}), find_overlap({"a": flat[:4], "b": flat[3:]})
    (None, ('a', 'b'))
    """
    storages: dict[int, list[Key]] = {}
    for name, tensor in named.items():
        if tensor.layout is torch.strided and tensor.numel():
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in storages.values():
        for one, other in combinations(names, 2):
            trained = named[one].requires_grad or named[other].requires_grad
            if trained and _overlap(named[one], named[other]):
                return one, other
    return None


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same storage have an element in common."""
    spans = sorted(
        (start := each.storage_offset() * each.itemsize, start + _extent(each)) for each in (one, other)
    )
    if spans[1][0] >= spans[0][1]:
        return False
    if one.itemsize != other.itemsize:
        return True
    seen = torch.zeros(max(end for _, end in spans) // one.itemsize, dtype=torch.bool)
    seen.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(seen.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to its last one."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.itemsize


def _rejection(name: str, tensor: Tensor, other_name: str, other: Tensor) -> Rejection:
    where, _, attribute = other_name.rpartition(".")
    owner = f"model.get_submodule({where!r})" if where else "model"
    is_tied = isinstance(other, nn.Parameter) and (tensor.shape, tensor.stride()) == (
        other.shape,
        other.stride(),
    )
    tied = f"the same parameter in both places, {owner}.{attribute} = model.get_parameter({name!r})"
    return Rejection(
        f"{other_name} and {name} of the model are different tensors in the same memory: in plain PyTorch an update of "
        "one changes the other, and ranks hold copies, of which each is updated by itself. What works: "
        f"{tied if is_tied else f'to compute {other_name} from {name} in the forward'}; or a copy, if they are to be "
        f"separate: .detach().clone() where {other_name} is made"
    )

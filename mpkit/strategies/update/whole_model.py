"""The trained parameters of a whole model, before it is divided among ranks, and what stands in for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["WholeParameter", "empty_whole", "free", "make_like", "stand_in", "trained_parameters"]


class WholeParameter(NamedTuple):
    """A trained parameter of the model, before it is divided among ranks.

    Attributes:
        kind: its class.
        attributes: those that its author gave it, such as a mark.
        original: the model's own object, on a rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: type[nn.Parameter] = nn.Parameter
    attributes: Mapping[str, Any] = MappingProxyType({})
    original: nn.Parameter | None = None


def trained_parameters(
    model: nn.Module, *, here: bool = False
) -> tuple[list[WholeParameter], dict[str, str]]:
    """Return a model's trained parameters in its order, and a parameter's first name for each of its names.

    >>> layer = nn.Linear(3, 2, bias=False)
    >>> whole, first = trained_parameters(nn.Sequential(layer, layer))
    >>> [each[:3] for each in whole], first
    ([('0.weight', (2, 3), torch.float32)], {'0.weight': '0.weight', '1.weight': '0.weight'})

    Args:
        model: the whole model.
        here: with the parameters themselves, since it is this rank's copy.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    whole = [_whole(n, p, here=here) for n, p in model.named_parameters() if p.requires_grad]
    return whole, {name: first[id(parameter)] for name, parameter in every}


def _whole(name: str, parameter: nn.Parameter, *, here: bool) -> WholeParameter:
    whole = WholeParameter(name, tuple(parameter.shape), parameter.dtype)
    if not issubclass(type(parameter), nn.Parameter):  # a fake tensor, whose attributes are torch's
        return whole
    original = parameter if here and type(parameter.data) is Tensor else None
    return whole._replace(kind=type(parameter), attributes=dict(vars(parameter)), original=original)


def free(whole: Sequence[WholeParameter], used: Collection[nn.Parameter]) -> None:
    """Free the memory of originals that this rank does not compute with, though a user's function may keep them."""
    for each in whole:
        if each.original is not None and each.original not in used:
            each.original.data = empty_whole(each, each.original.device)


def stand_in(whole: WholeParameter, device: torch.device | None = None) -> nn.Parameter:
    """Return a parameter of the whole shape that takes no memory: all its elements are the same zero."""
    return make_like(whole, empty_whole(whole, device))


def make_like(whole: WholeParameter, data: Tensor) -> nn.Parameter:
    """Return a parameter that looks as the model's does, but for its values."""
    plain = nn.Parameter(data)
    parameter = plain if whole.kind is nn.Parameter else Tensor._make_subclass(whole.kind, data, True)
    vars(parameter).update(whole.attributes)
    return parameter


def empty_whole(whole: WholeParameter, device: torch.device | None) -> Tensor:
    """Return zeros of the whole shape that take no memory."""
    return torch.zeros((), dtype=whole.dtype, device=device).expand(whole.shape)

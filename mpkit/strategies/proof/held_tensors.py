"""What a rank holds of a wrapped module's parameters, and the whole tensors that the ranks hold together.

whole       each rank has the whole parameter (torch's DDP, ZeroRedundancyOptimizer)
DTensor     torch knows its parts (FSDP2, tensor parallelism by `parallelize_module`)
elements    a wrapper of mpkit's says which elements a rank has (`mk.tensor_parallel`, `mk.pipeline`)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mpkit.strategies.proof.ranks import Ranks
from mpkit.strategies.proof.whole_step import Elements
from mpkit.strategies.runtime.evidence import digest_of

__all__ = ["HeldTensors", "kept", "local", "whole"]


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; every rank that holds a part calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else local(tensor)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, as a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.as_subclass(Tensor)


def kept(gradient: Tensor | None) -> Tensor | None:
    """Return a copy of what a rank has of a gradient."""
    if gradient is None:
        return None
    return (gradient if isinstance(gradient, DTensor) else local(gradient)).detach().clone()


class HeldTensors:
    """The parameters of a wrapped module on this rank.

    Args:
        named: what this rank's optimizer updates, by the names in the plain module.
        elements: which elements of parameters these are; None where each is whole, or a DTensor.
        ranks: all ranks.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], elements: Mapping[str, Elements] | None, ranks: Ranks
    ) -> None:
        self.named, self._elements, self._ranks = dict(named), elements, ranks

    @property
    def divided(self) -> bool:
        """Whether a wrapper of mpkit's has divided the parameters, so that ranks hold other elements."""
        return self._elements is not None

    def versions(self) -> list[int]:
        """Return how often each parameter was changed in place."""
        return [parameter._version for parameter in self.named.values()]

    def part(self, name: str, of: Tensor) -> Tensor | None:
        """Return what a rank has of a whole tensor, flat; None if it has none of it."""
        if self._elements is None:
            return of.reshape(-1)
        where = self._elements.get(name)
        if where is None or not self.named[name].numel():
            return None
        return where.take(of, self.named[name].numel())

    @torch.no_grad()
    def take_weights(self, into: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Copy the whole weights into the plain parameters, and return what those were; every rank calls it."""
        before = {name: parameter.detach().clone() for name, parameter in into.items()}
        if self._elements is not None:
            for name, parameter in into.items():
                self._put_together(name, parameter)
            return before
        digests = {}
        for name, parameter in into.items():
            parameter.requires_grad_(self.named[name].requires_grad).copy_(whole(self.named[name].detach()))
            digests[name] = digest_of(parameter)
        self._ranks.digests.append(digests)
        return before

    def _put_together(self, name: str, parameter: nn.Parameter) -> None:
        mine, where = self.named.get(name), (self._elements or {}).get(name)
        sent = mine is not None and (where, mine.detach().cpu().reshape(-1), mine.requires_grad)
        every = [each for each in self._ranks.all(sent) if each and each[1].numel()]
        made = torch.zeros(parameter.shape, dtype=every[0][1].dtype if every else parameter.dtype)
        filled = torch.zeros(parameter.shape, dtype=torch.bool)
        for place, values, trained in every:
            parameter.requires_grad_(trained)
            known = place.take(filled, values.numel())
            if bool(known.all()) and not torch.equal(place.take(made, values.numel()), values):
                self._ranks.findings.append(
                    f"{name} on rank {place.rank} is not what it is on the ranks before it."
                )
            place.put(values, made)
            place.put(torch.ones_like(values, dtype=torch.bool), filled)
        if not bool(filled.all()):
            self._ranks.findings.append(f"{name} has elements that no rank updates.")
        parameter.copy_(made)

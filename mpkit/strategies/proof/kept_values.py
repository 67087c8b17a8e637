"""What modules keep besides parameters and buffers, where tensors are in what they return, and generators' states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.strategies.models.nested_values import ATOMS, flatten

__all__ = ["RandomStates", "apart_from_graph", "kept_attributes", "kept_of_graph", "settings", "tensors_of"]

OF_TORCH = {key for key in vars(nn.Module()) if key != "training"}
"""Attributes that are PyTorch's own."""


def settings(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the plain attributes of a module's modules, `training` among them, by module.

    >>> settings(nn.Dropout(0.5))
    {'': {'training': True, 'p': 0.5, 'inplace': False}}
    """
    kinds = (bool, int, float, str, type(None))
    return {
        name: {
            key: value
            for key, value in vars(inner).items()
            if isinstance(value, kinds) and key not in OF_TORCH
        }
        for name, inner in module.named_modules()
    }


def kept_attributes(module: nn.Module) -> Iterator[tuple[str, str, list[Any], Any]]:
    """Yield the attributes of a module's modules that hold tensors: module, name, leaves and structure."""
    for name, inner in module.named_modules():
        for key, value in list(vars(inner).items()):
            if key in OF_TORCH or isinstance(value, ATOMS):
                continue
            leaves, shape = flatten(value)
            if any(isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) for leaf in leaves):
                yield name, key, leaves, shape


def kept_of_graph(module: nn.Module) -> list[Tensor]:
    """Return the tensors that layers keep of a forward, with its graph: a term of the loss, a state."""
    leaves = (leaf for _, _, leaves, _ in kept_attributes(module) for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value, each once."""
    return list({id(leaf): leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)}.values())


def apart_from_graph(leaf: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a copy of a tensor that belongs to no graph but its own, in this dtype if it is of floating point."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    made = leaf.detach().clone()
    made = made.to(dtype) if dtype is not None and made.is_floating_point() else made
    if not leaf.requires_grad:
        return made
    with torch.enable_grad():
        return made.requires_grad_().clone()  # no leaf, which a layer could not change in place


@dataclass(frozen=True)
class RandomStates:
    """The states at one moment.

    Attributes:
        cpu, gpu: torch's; gpu of the module's device, if it is one.
        python, numpy: Python's and NumPy's.
        own: those of generators that the module keeps, in order.
    """

    cpu: Tensor
    gpu: Tensor | None
    python: Any
    numpy: Any
    own: list[Tensor]

    @classmethod
    def capture(cls, module: nn.Module, device: torch.device) -> RandomStates:
        """Return the states as they are."""
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        own = [generator.get_state() for generator in _generators(module)]
        return cls(torch.get_rng_state(), gpu, random.getstate(), np.random.get_state(), own)

    def drew(self, later: RandomStates) -> bool:
        """Return whether torch's numbers were drawn between this moment and a later one."""
        if not torch.equal(self.cpu, later.cpu):
            return True
        return self.gpu is not None and later.gpu is not None and not torch.equal(self.gpu, later.gpu)

    @contextmanager
    def draw_from(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Draw from these states within the block; afterwards all generators are as before."""
        now = RandomStates.capture(module, device)
        self._set(module, device)
        try:
            yield
        finally:
            now._set(module, device)

    def _set(self, module: nn.Module, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        for generator, state in zip(_generators(module), self.own, strict=True):
            generator.set_state(state)


def _generators(module: nn.Module) -> list[torch.Generator]:
    every = (value for inner in module.modules() for value in vars(inner).values())
    return [value for value in every if isinstance(value, torch.Generator)]

"""The states of random number generators: torch's, Python's, NumPy's, and those that a module keeps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["RandomStates"]


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

"""Several optimizers as one: Muon for the matrices and AdamW for the rest, as torchtitan's OptimizersContainer.

Each keeps its own groups and its own way of stepping. Groups and states are shared with the whole, so that learning
rates, checkpoints and sharding see one optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

__all__ = ["SeveralOptimizers", "kind_of", "parts_of"]


class SeveralOptimizers(Optimizer):
    """Optimizers that step one after the other; no parameter belongs to two of them.

    >>> import torch
    >>> w, b = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    >>> both = SeveralOptimizers([torch.optim.SGD([w], lr=0.1), torch.optim.AdamW([b])])
    >>> kind_of(both), [group["lr"] for group in both.param_groups]
    ('SGD with AdamW', [0.1, 0.001])

    Args:
        optimizers: the optimizers.

    Attributes:
        optimizers: the same.

    Raises:
        ValueError: a parameter belongs to two of them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for each in self.optimizers for group in each.param_groups], {})
        shared: defaultdict[Any, Any] = defaultdict(dict)
        for each in self.optimizers:
            shared |= each.state
            each.state = shared
        self.state = shared

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let each optimizer step that has parameters here."""
        for each in self.optimizers:
            each.param_groups[:] = [group for group in each.param_groups if group["params"]]
            if each.param_groups:
                each.step()


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer consists of: itself, if it is not several."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def kind_of(optimizer: Optimizer) -> str:
    """Return an optimizer's class in words."""
    return " with ".join(type(each).__name__ for each in parts_of(optimizer))

"""Measure the blocks of a model on this machine: time, and bytes kept for their backward.

Each call of a block is run alone, forward and backward, on the inputs that the model's forward passes to it. The result
is the minimum over a few runs of the CPU time that this thread used.
"""

from __future__ import annotations

import copy
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.partition.walk import ForwardWalk, OriginalForward

__all__ = ["CallCost", "Timing"]

TIMES = 3
"""How often each block is run."""


class CallCost(NamedTuple):
    """The cost of one call of a block.

    Attributes:
        forward, backward: seconds.
        kept: bytes that autograd saves, besides the block's parameters.
    """

    forward: float
    backward: float
    kept: int


class Timing(ForwardWalk):
    """A walk that computes everything and times each call of a block.

    Attributes:
        calls: the name and cost of each call, in order.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.calls: list[tuple[str, CallCost]] = []

    def node(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Time the call of a block; operations between blocks are not seen, since there are no values here."""
        assert isinstance(func, OriginalForward)
        runs = [_once(func, args, kwargs) for _ in range(TIMES)]
        taken = CallCost(
            min(run.forward for run in runs), min(run.backward for run in runs), max(run.kept for run in runs)
        )
        self.calls.append((name, taken))
        with torch.no_grad():
            return func(*args, **kwargs)


def _once(block: OriginalForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallCost:
    leaves, shape = flatten((args, kwargs))
    # Objects are copied too, so that a cache that a block writes into starts the same in each run.
    copies = [_leaf(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
    own = {parameter.untyped_storage()._cdata for parameter in block.module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    again_args, again_kwargs = rebuild(shape, copies)
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        begun = time.thread_time()
        made, _ = flatten(block(*again_args, **again_kwargs))
        between = time.thread_time()
    ends = [t for t in made if isinstance(t, Tensor) and t.requires_grad]
    wanted = [t for t in (*copies, *block.module.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    middle = time.thread_time()
    if ends and wanted:
        torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
    return CallCost(between - begun, time.thread_time() - middle, sum(kept.values()))


def _leaf(tensor: Tensor) -> Tensor:
    """Return a copy that a block may write into, and that has a gradient as in the middle of a model if it can."""
    copied = tensor.detach().clone()
    return copied.requires_grad_().clone() if copied.is_floating_point() else copied

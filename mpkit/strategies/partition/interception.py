"""What torch hides from a walk: calls of autograd functions, and what a checkpoint is around.

Of an autograd function torch shows a mode only what its forward computes, which has no graph, so these operations as
nodes would have no gradients: the call as a whole is a node. Of a checkpoint the walk sees the blocks within, one by
one, and lets each be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch.utils.checkpoint
from torch.autograd import Function
from torch.overrides import handle_torch_function

from mpkit.common.torch_private import GENERATORS

__all__ = ["intercept"]


class _Walk(Protocol):
    checkpoints: int


@cache
def intercept(current_walk: Callable[[], _Walk | None]) -> None:
    """Let walks see both from now on, in this process."""
    inner = vars(Function)["apply"].__get__  # written in Python before torch 2.14, in C from then on
    checkpoint: Any = torch.utils.checkpoint
    # What checkpoint() calls: another function before torch 2.14.
    name = next(each for each in GENERATORS if hasattr(checkpoint, each))
    around = getattr(checkpoint, name)

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        walk = current_walk()
        if walk is None:
            return inner(None, cls)(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            function, _, *rest = args
            with contextmanager(_within_checkpoint)(walk):
                return function(*rest)
        return handle_torch_function(cls.apply, (), *args, **kwargs)

    def around_checkpointed(*args: Any, **kwargs: Any) -> Any:
        walk = current_walk()
        return around(*args, **kwargs) if walk is None else _within_checkpoint(walk)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    setattr(checkpoint, name, around_checkpointed)


def _within_checkpoint(walk: _Walk) -> Iterator[None]:
    """Yield once, as torch's own generator does, while what a checkpoint is around runs."""
    walk.checkpoints += 1
    try:
        yield
    finally:
        walk.checkpoints -= 1

"""The steps of a program's optimizers."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mpkit.trace import Kind
from mpkit.watch.actions import Actions

__all__ = ["Optimizers"]


class Optimizers:
    """The optimizers of one rank's program; one that steps within another (ZeroRedundancyOptimizer) is a part of it.

    Args:
        actions: the rank's actions.
        seen: the optimizers that have stepped are added here.
    """

    def __init__(self, actions: Actions, seen: weakref.WeakSet[Optimizer]) -> None:
        self._actions, self.seen = actions, seen
        self._open: list[int] = []
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Begin to see optimizers step."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def uninstall(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self.seen.add(optimizer)
        self._open.append(self._actions.begin(Kind.OPTIMIZER, type(optimizer).__name__))

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if self._open:
            self._actions.end(self._open.pop())
        if not self._open:
            self._actions.optimizer_stepped()

"""The steps of a program's optimizers."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mpkit.launch.watch.actions import Actions
from mpkit.trace import Kind

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
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def uninstall(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seen.add(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._open.append(self._begin(optimizer))
            return None
        place = len(self._open)
        self._open.append(-1)

        def run_closure() -> Any:
            """Call the closure: its forward and backward are actions of their own, what follows is the optimizer's."""
            if self._open[place] >= 0:
                self._actions.end(self._open[place])
            result = closure()
            self._open[place] = self._begin(optimizer)
            return result

        return (args[0], run_closure, *args[2:]), {name: kwargs[name] for name in kwargs if name != "closure"}

    def _begin(self, optimizer: Optimizer) -> int:
        return self._actions.begin(Kind.OPTIMIZER, type(optimizer).__name__)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._open and (op := self._open.pop()) >= 0:
            self._actions.end(op)
        if not self._open:
            self._actions.optimizer_stepped()

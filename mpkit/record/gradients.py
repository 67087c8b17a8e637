"""Gradients in the ledger: one by one while a shape is measured, all at once afterwards.

A hook on each parameter sees its gradient the moment it is made; called between two kernels, with nothing of it in
any cache, it costs microseconds, and a model has many parameters. So the hooks are there only while a backward is
measured (`mpkit.record.saved`), and later the gradients are collected when a backward is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mpkit.record.ledger import Ledger

__all__ = ["Gradients"]


class Gradients:
    """The gradients of some parameters.

    Args:
        made: called around the making of each gradient, while `watch` is on.
    """

    def __init__(self, ledger: Ledger, parameters: Iterable[nn.Parameter], made: Callable[[], None]) -> None:
        self._ledger = ledger
        self._made = made
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._last: Callable[[], torch.Tensor | None] = (
            _nothing  # the last one's gradient when all were there
        )
        self._hooks: list[RemovableHandle] = []

    def watch(self) -> None:
        """See each gradient as it is made."""
        if not self._hooks:
            self._hooks = [p.register_post_accumulate_grad_hook(self._see) for p in self._parameters]

    def unwatch(self) -> None:
        """See them only when they are collected."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def collect(self) -> int:
        """Take the gradients that are new since the last time into the ledger; returns their bytes.

        What is new replaces what died: `zero_grad` drops all, and backward makes all. So while the last one is
        still there, so are the others.
        """
        if not self._parameters or (self._last() is not None and self._last() is self._parameters[-1].grad):
            return 0
        grads = [parameter.grad for parameter in self._parameters]
        found = [grad for grad in grads if grad is not None]
        self._last = weakref.ref(found[-1]) if len(found) == len(grads) else _nothing
        return self._ledger.enter(found, "grads")

    def _see(self, parameter: torch.Tensor) -> None:
        self._made()
        if parameter.grad is not None:
            self._ledger.track(parameter.grad, "grads")
        self._made()


def _nothing() -> None:
    return None

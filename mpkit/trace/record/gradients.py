"""Gradients in the ledger: one by one while a shape is measured, all at once afterwards.

A hook on each parameter sees its gradient as soon as it is made. Since it is called between two kernels, with none of
its code in any cache, it is slow, and a model has many parameters. So the hooks exist only while a backward is
 measured (`mpkit.trace.record.saved_tensors`); afterwards the gradients are collected when a backward is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mpkit.trace.record.ledger import Ledger

__all__ = ["RecordedGradients"]


class RecordedGradients:
    """The gradients of some parameters.

    Args:
        made: called before and after each gradient is accounted for, while `watch` is on.
    """

    def __init__(self, ledger: Ledger, parameters: Iterable[nn.Parameter], made: Callable[[], None]) -> None:
        self._ledger = ledger
        self._made = made
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._known: list[weakref.ref[torch.Tensor]] = []  # the gradients at the last look,
        self._there: list[bool] = []  # which of the parameters had one,
        self._others = -1  # and bytes of all but the last, if each has its own storage; -1 if not
        self._last: Callable[[], torch.Tensor | None] = (
            _do_nothing  # the last parameter's gradient, when all had one
        )
        self._hooks: list[RemovableHandle] = []

    def watch(self) -> None:
        """Start to see each gradient as it is made."""
        if not self._hooks:
            self._there = []  # what `collect` remembered is out of date from here on
            self._hooks = [p.register_post_accumulate_grad_hook(self._see) for p in self._parameters]

    def unwatch(self) -> None:
        """Stop seeing gradients one by one; they are then collected."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def collect(self) -> int:
        """Enter the gradients that are new since the last call into the ledger; return their bytes.

        New gradients replace dropped ones: `zero_grad` drops all, and backward makes all. So as long as the last one is
        still there, so are the others; and if the same parameters have new ones, these have as many bytes.
        """
        last = self._last()
        if last is not None and last is self._parameters[-1].grad:
            return 0
        grads = [parameter.grad for parameter in self._parameters]
        present = [grad for grad in grads if grad is not None]
        there = [grad is not None for grad in grads]
        known = [weakref.ref(grad) for grad in present]
        all_new = there == self._there and not any(
            old() is grad for old, grad in zip(self._known, present, strict=True)
        )
        self._known, self._there = known, there
        self._last = known[-1] if all(there) and known else _do_nothing
        if not present:
            return 0
        if all_new and self._others >= 0 and _owns(present[0]) and _owns(present[-1]):
            return self._ledger.enter_block(known[:-1], self._others, present[-1], "grads")
        new = self._ledger.enter(present, "grads")
        each_its_own = new == sum(grad.nbytes for grad in present) and all(map(_owns, present))
        self._others = new - present[-1].nbytes if each_its_own else -1
        return new

    def _see(self, parameter: torch.Tensor) -> None:
        self._made()
        if parameter.grad is not None:
            self._ledger.track(parameter.grad, "grads")
        self._made()


def _owns(grad: torch.Tensor) -> bool:
    """Return whether the gradient has its own storage and is not a view of a bucket."""
    return grad.untyped_storage().nbytes() == grad.nbytes


def _do_nothing() -> None:
    return None

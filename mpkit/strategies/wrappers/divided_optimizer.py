"""Optimizers that are given parts: of each parameter, this rank's elements or rows; or some of the parameters.

What an optimizer makes of parts is part of what it makes of the whole if it treats each element by itself, as
PyTorch's elementwise optimizers do: Muon and Adafactor see a matrix, and LBFGS all parameters at once. An optimizer
that is not known to is refused, since nothing else would show it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpkit.strategies.prepare.optimizer import ELEMENTWISE
from mpkit.strategies.wrappers.gradient_part import mark_part, unmark_part

__all__ = ["check_optimizer", "mark_divided"]

Parts = Literal["elements", "parameters"]


def mark_divided(parameter: nn.Parameter, by: Parts, wrapper: str) -> None:
    """Mark a parameter as one of which other ranks have the rest, or beside which they have others.

    Args:
        by: what of the model this rank's optimizer is given: some elements of each parameter, or some parameters.
        wrapper: the wrapper's call, for errors: "mk.tensor_parallel".
    """
    parameter.divided = by, wrapper  # type: ignore[attr-defined]
    _watch_steps()


@cache
def _watch_steps() -> None:
    """Check each optimizer in this process before its first step, and let it see plain gradients in each."""
    seen: WeakSet[torch.optim.Optimizer] = WeakSet()

    def parts(optimizer: torch.optim.Optimizer) -> list[Any]:
        every = (p for group in optimizer.param_groups for p in group["params"])
        return [p for p in every if hasattr(p, "divided") and p.grad is not None]

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer not in seen:
            seen.add(optimizer)
            check_optimizer(optimizer)
        for parameter in parts(optimizer):
            parameter.grad = unmark_part(parameter.grad)

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in parts(optimizer):
            parameter.grad = mark_part(parameter.grad)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer does the same on parts of its parameters, if they are divided.

    Raises:
        ValueError: it is not known to.
    """
    marks = [getattr(p, "divided", None) for group in optimizer.param_groups for p in group["params"]]
    by, wrapper = next(filter(None, marks), (None, ""))
    known = type(optimizer) in ELEMENTWISE or getattr(optimizer, "elementwise", False)
    if by is None or known or (by == "parameters" and not isinstance(optimizer, torch.optim.LBFGS)):
        return
    kind = type(optimizer).__name__
    raise ValueError(
        f"{wrapper} gives an optimizer only some {by}, and {kind} is not known to treat each element by its own "
        "gradient and state alone. What works: torch.optim.AdamW(model.parameters(), lr=1e-3); "
        f"{kind}.elementwise = True, if it does; or {kind} with mk.ddp, where each rank updates all"
    )

"""Optimizers that are given parts: of each parameter, this rank's elements or rows; or some of the parameters.

Before the first step of an optimizer, a copy of it takes three small ones on made-up parameters, whole and divided. One
that ends with other numbers is refused, since nothing else would show it: Muon and Adafactor see a matrix, and LBFGS
all parameters at once. PyTorch's elementwise optimizers need no trial.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from functools import cache
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpkit.common.exceptions import one_line
from mpkit.strategies.prepare.optimizer.creation import ELEMENTWISE
from mpkit.strategies.wrappers.gradient_part import mark_part, unmark_part

__all__ = ["check_optimizers", "mark_divided"]

Parts = Literal["elements", "parameters"]


def mark_divided(parameter: nn.Parameter, by: Parts, wrapper: str) -> None:
    """Mark a parameter as one of which other ranks have the rest, or beside which they have others.

    Args:
        by: what of the model this rank's optimizer is given: some elements of each parameter, or some parameters.
        wrapper: the wrapper's call, for errors: "mk.fully_shard".
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
            check_optimizers(optimizer)
        for parameter in parts(optimizer):
            parameter.grad = unmark_part(parameter.grad)

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in parts(optimizer):
            parameter.grad = mark_part(parameter.grad)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def check_optimizers(optimizer: torch.optim.Optimizer, by: Parts | None = None, wrapper: str = "") -> None:
    """Check that an optimizer does the same on parts of its parameters, if they are divided.

    Args:
        by, wrapper: as in `mark_divided`; None for what the parameters say.

    Raises:
        ValueError: it does not, or that cannot be found out.
    """
    marks = [getattr(p, "divided", None) for group in optimizer.param_groups for p in group["params"]]
    by, wrapper = (by, wrapper) if by is not None else next(filter(None, marks), (None, ""))
    if by is None or type(optimizer) in ELEMENTWISE:
        return
    kind = type(optimizer).__name__
    instead = "torch.optim.AdamW(model.parameters(), lr=1e-3) works"
    instead += f", and so does {kind} with mk.ddp, where each rank updates all"
    try:
        off = _off_by(optimizer, by)
    except Exception as error:
        raise ValueError(
            f"{wrapper} gives an optimizer only some {by}, and whether {kind} does the same with these cannot be "
            f"found out: {one_line(error)}. {instead}"
        ) from None
    if off > 1e-6:
        raise ValueError(
            f"{wrapper} gives an optimizer only some {by}, and what {kind} does with these depends on the others: it "
            f"is off by {off:.1g} of its update. {instead}"
        )


def _off_by(optimizer: torch.optim.Optimizer, by: Parts) -> float:
    """Return how far parameters end from where they belong if they are divided, relative to their updates."""
    first = [torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6), torch.ones(5, dtype=torch.float64)]
    whole = _steps(optimizer, [tensor.clone() for tensor in first], [slice(None), slice(None)])
    if by == "parameters":
        parts = [_steps(optimizer, [tensor.clone()], [slice(None)])[0] for tensor in first]
    else:
        cuts = [(slice(0, 10), slice(0, 2)), (slice(10, None), slice(2, None))]
        halves = [
            _steps(optimizer, [_part(t, cut) for t, cut in zip(first, both, strict=True)], list(both))
            for both in cuts
        ]
        parts = [torch.cat([a.reshape(-1), b.reshape(-1)]) for a, b in zip(*halves, strict=True)]
    apart = max((a.reshape(-1) - b.reshape(-1)).abs().max().item() for a, b in zip(whole, parts, strict=True))
    return apart / max((a - b).abs().max().item() for a, b in zip(whole, first, strict=True))


def _part(tensor: Tensor, which: slice) -> Tensor:
    """Return a part in as many dimensions as shares have."""
    return tensor.reshape(-1)[which].clone().view(-1, *[1] * (tensor.dim() - 1))


def _steps(optimizer: torch.optim.Optimizer, values: list[Tensor], which: list[slice]) -> list[Tensor]:
    """Return the values after three steps of a copy of the optimizer, with gradients that belong to the elements."""
    parameters = [nn.Parameter(value) for value in values]
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))  # copy.copy would leave out what __getstate__ does
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.param_groups = [{**optimizer.param_groups[0], "params": parameters}]
    twin.state = defaultdict(dict)
    for step in range(3):
        for parameter, elements in zip(parameters, which, strict=True):
            numbers = torch.arange(24, dtype=torch.float64)[: 24 if parameter.dim() == 2 else 5][elements]
            parameter.grad = torch.cos(numbers * (1 + step)).view_as(parameter) * 10.0 ** (step - 1)
        type(twin).step(twin)
    return [parameter.detach() for parameter in parameters]

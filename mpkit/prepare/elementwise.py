"""ZeRO cuts parameters anywhere, so an optimizer has to treat each element by itself. Does it?

Asking is not enough, since an optimizer may be anybody's. So it is tried: the same steps on a small matrix and on the
two halves of its elements, which must end in the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes  # private: tests/test_trace_fake.py guards it

from mpkit.plan import Plan
from mpkit.prepare.arguments import ADAM
from mpkit.prepare.dry_run import quiet

__all__ = ["check_elementwise"]

SHAPE = (4, 6)


def check_elementwise(optimizer: Callable[[Any], Any], model: nn.Module, plan: Plan) -> None:
    """Under ZeRO: an optimizer that gives the same when it is given parts of parameters.

    Args:
        optimizer: as for `Cluster.train`, checked so far.
        model: whose parameters it is for.
        plan: nothing is checked unless it divides parameters.

    Raises:
        ValueError: an element's new value depends on other elements.
    """
    if not plan.zero and plan.tp == 1:
        return
    with (
        quiet(),
        _disable_current_modes(),
    ):  # numbers are needed here, also where a rank is played without them
        groups = len(_made(optimizer, model).param_groups)
        wrong = next((i for i in range(groups) if not _is_elementwise(optimizer, model, i)), None)
    if wrong is None:
        return
    kind = type(_made(optimizer, model)).__name__
    raise ValueError(
        f"optimizer: {kind} with {plan}: {_who(plan)}, and "
        f"{kind} changes an element by what the others are (a matrix's rows, or its norm), or takes matrices only. "
        f"Either an optimizer that treats each element by itself, {ADAM}; or whole parameters on every rank: "
        f"Plan.ddp({plan.ranks})"
    )


def _who(plan: Plan) -> str:
    if plan.zero:
        return "ZeRO gives each rank a part of a parameter's elements, in one dimension"
    return "tensor parallelism gives each rank a part of a parameter's rows or columns"


def _made(optimizer: Callable[[Any], Any], model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of stand-ins that take no memory."""
    made: torch.optim.Optimizer = optimizer(
        [
            nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), p.requires_grad)
            for p in model.parameters()
            if p.requires_grad
        ]
    )
    return made


def _is_elementwise(optimizer: Callable[[Any], Any], model: nn.Module, group: int) -> bool:
    values = torch.linspace(-1, 1, 24, dtype=torch.float32)
    ends = []
    for parts in ([values.view(SHAPE)], [values[:12], values[12:]]):
        made = _made(optimizer, model)
        held = [nn.Parameter(part.clone()) for part in parts]
        made.param_groups[:] = [made.param_groups[group]]
        made.param_groups[0]["params"] = held
        try:
            for step in range(3):
                gradient = torch.sin(values * (step + 2)).split([part.numel() for part in held])
                for part, grad in zip(held, gradient, strict=True):
                    part.grad = grad.view(part.shape).clone()
                made.step()
        except Exception:
            return len(parts) == 1  # it cannot be tried on a whole one; or cannot work on parts
        ends.append(torch.cat([part.detach().reshape(-1) for part in held]))
    return torch.allclose(ends[0], ends[1], rtol=1e-5, atol=1e-7)

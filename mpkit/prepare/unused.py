"""Parameters that no sample ever uses: replicas would wait for their gradients, so this is said before they start.

Which parameters get a gradient is seen on tensors without content. A forward that looks at numbers may go another way
on each rank; of such a one only the ranks can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpkit.parallel.ddp import unused_message
from mpkit.parallel.microbatch import Value, map_tensors, part
from mpkit.parallel.stage import call
from mpkit.plan import Plan
from mpkit.prepare.copying import copied

__all__ = ["check_unused"]


def check_unused(
    model: nn.Module, batch: tuple[Value, Value], plan: Plan, loss: Callable[[Any, Any], Any]
) -> None:
    """Refuse parameters that get no gradient, where the plan allows none and sums gradients over replicas.

    Args:
        model: whole.
        batch: of which a replica has at least one sample.

    Raises:
        ValueError: there are such parameters; with their names.
    """
    if plan.dp == 1 or plan.unused != "error":
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    few = slice(0, 2)  # BatchNorm wants two samples
    try:
        with mode, torch.enable_grad():
            fake = _without_content(model, mode)
            x, y = (map_tensors(mode.from_tensor, part(value, few)) for value in batch)
            value = loss(call(fake, x, first=True), y)
            value = value[0] if isinstance(value, tuple) else value  # a sum, and what it counts
            if not _reached(value) >= _trained(fake):
                value.backward()  # what a checkpoint hides from the graph gets its gradient now
    except Exception:  # control flow that looks at numbers: nothing is known here
        return
    reached = _reached(value)
    names = [
        name for name, parameter in fake.named_parameters()
        if parameter.requires_grad and parameter.grad is None and id(parameter) not in reached
    ]  # fmt: skip
    if names:
        raise ValueError(unused_message(names))


def _trained(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def _reached(value: Tensor) -> set[int]:
    """The parameters in a value's graph."""
    found: set[int] = set()
    seen: set[Any] = set()
    ahead: list[Any] = [value.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        ahead += [following for following, _ in node.next_functions]
    return found


def _without_content(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer)
    return copied(model, memo)

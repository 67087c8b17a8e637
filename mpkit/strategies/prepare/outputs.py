"""Refuses parameters that no sample ever uses before the ranks start: replicas would wait for their gradients.

Fake tensors show which parameters get a gradient. A forward whose control flow depends on values may take a different
path on each rank; there only the ranks can detect unused parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.caught import needs_content, one_line, report
from mpkit.plan.plan import Plan
from mpkit.strategies.data.microbatch import Value, map_tensors, part
from mpkit.strategies.data_parallel.unused import unused_message
from mpkit.strategies.prepare.dry_run.copying import without_content
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.fake_mode import FakeMode

__all__ = ["check_unused"]


def check_unused(
    model: nn.Module, batch: tuple[Value, Value], plan: Plan, loss: Callable[[Any, Any], Any]
) -> None:
    """Refuse parameters that get no gradient where gradients are summed over replicas, unless the plan allows them.

    Args:
        model: the whole model.
        batch: a batch, of which each replica has at least one sample.

    Raises:
        ValueError: there are such parameters; the message names them.
    """
    if plan.dp == 1 or plan.unused != "error":
        return
    mode = FakeMode()
    few = slice(0, 2)  # BatchNorm needs two samples
    try:
        with mode, torch.enable_grad():
            fake = without_content(model, mode)
            x, y = (map_tensors(mode.from_tensor, part(value, few)) for value in batch)
            value = loss(call(fake, x, first=True), y)
            value = value[0] if isinstance(value, tuple) else value  # (total, count)
            if not _reached_parameters(value) >= _trained_parameters(fake):
                value.backward()  # parameters that checkpointing hides from the graph get gradients now
    except Exception as error:
        if not needs_content(error):
            report(
                f"{plan}: whether every parameter gets a gradient is not known before the ranks start: on two samples "
                f"without content, {type(model).__name__} or its loss raises {one_line(error)}. If a parameter gets "
                "none, the ranks stop in the first step and name it."
            )
        return
    reached = _reached_parameters(value)
    names = [
        name for name, parameter in fake.named_parameters()
        if parameter.requires_grad and parameter.grad is None and id(parameter) not in reached
    ]  # fmt: skip
    if names:
        raise ValueError(unused_message(names))


def _trained_parameters(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def _reached_parameters(value: Tensor) -> set[int]:
    """Return the ids of the parameters in a value's graph."""
    reached: set[int] = set()
    seen: set[Any] = set()
    ahead: list[Any] = [value.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        ahead += [following for following, _ in node.next_functions]
    return reached

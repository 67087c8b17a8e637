"""Checks of what a forward makes: outputs that rank 0 gathers, a graph that reaches every parameter, a loss of all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.exceptions import needs_content, one_line, report
from mpkit.strategies.data.microbatch import map_tensors, part
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.loss.whole_batch import WholeBatchLoss
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.prepare.dry_run.copies import without_content
from mpkit.strategies.replicas.part import unused_message
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.fake_mode import FakeMode

__all__ = ["check_gathered_outputs", "check_unused_parameters", "check_whole_batch_loss"]


def check_gathered_outputs(resolved: ResolvedPlan, _: Task) -> Rejection | None:
    """Reject outputs that rank 0 cannot gather (DP), since they are no tensors whose first dimension is the batch."""
    plan = resolved.plan
    if plan.dp == 1 or plan.data_parallel != "dp":
        return None
    for key, layers in resolved.numbers.items():
        assert isinstance(key, tuple)
        samples, output = key[0][1][0], layers[-2].output
        if output is None or any(spec.shape[:1] != (samples,) for spec in output.specs):
            made = "neither a tensor nor a tuple of tensors" if output is None else f"{output}"
            return Rejection(
                f"{plan}: DP gathers the outputs of all ranks in their first dimension, which has to be the batch, and "
                f"of {samples} sample{'s' * (samples > 1)} the model makes {made}. Either let it return a tensor "
                f"(batch, ...) or a tuple of such, or Plan.ddp({plan.dp}), which gathers none."
            )
    return None


def check_whole_batch_loss(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject losses of the whole batch where a rank does not see all of it at once."""
    plan = resolved.plan
    if not isinstance(task.given_loss, WholeBatchLoss):
        return None
    if plan.microbatches > 1:
        return Rejection(
            f"{plan}: mk.whole_batch_loss needs all samples at once, and of {plan.microbatches} micro-batches the "
            "first ones are over before the last one begins: microbatches=1 in the Plan (schedule='naive')."
        )
    if plan.cp > 1:
        return Rejection(
            f"{plan}: mk.whole_batch_loss gathers samples, and with cp={plan.cp} each rank has a part of every "
            f"sequence: cp=1, as in mk.Plan.ddp({plan.ranks})."
        )
    return None


def check_unused_parameters(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject parameters that no sample ever uses where replicas would wait for their gradients.

    Fake tensors show which parameters get a gradient. A forward whose control flow depends on values may take a
    different path on each rank; there only the ranks can detect unused parameters.
    """
    plan, model = resolved.plan, task.model
    if plan.dp == 1 or plan.unused != "error":
        return None
    mode = FakeMode()
    few = slice(0, 2)  # BatchNorm needs two samples
    try:
        with mode, torch.enable_grad():
            fake = without_content(model, mode)
            x, y = (map_tensors(mode.from_tensor, part(value, few)) for value in task.batch)
            value = task.loss(call(fake, x, first=True), y)
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
        return None
    reached = _reached_parameters(value)
    names = [
        name for name, parameter in fake.named_parameters()
        if parameter.requires_grad and parameter.grad is None and id(parameter) not in reached
    ]  # fmt: skip
    return Rejection(unused_message(names)) if names else None


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

"""What a forward does besides computing its output, which ranks that hold a part of the model cannot do as it does.

    transforms   it calls a layer within torch.vmap, torch.func.grad or another transform of torch.func
    gradients    it computes gradients of its own layers, by torch.autograd.grad
    writes       it writes into a parameter
    returns      it returns a parameter, or a view of one

ZeRO-3 gives a layer its parameters around the layer's own forward and backward, recomputation runs forwards without a
graph first, and a pipeline's rank has stand-ins for what other ranks hold.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mpkit.common.exceptions import needs_content
from mpkit.common.torch_private import peek_interpreter_stack
from mpkit.strategies.data.microbatch import map_tensors
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.models.nested_values import flatten
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.prepare.dry_run.copies import without_content
from mpkit.strategies.prepare.dry_run.isolation import quiet
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.fake_mode import FakeMode

__all__ = ["check_forward_effects"]


def check_forward_effects(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject forwards that transform layers, compute gradients, write into parameters or return them, where divided."""
    plan = resolved.plan
    gathers, recomputes = plan.zero == 3, plan.recompute not in ("none", "selective")
    if not (gathers or recomputes or plan.pp > 1):
        return None
    transformed, differentiated, written, returned = _observe(task)
    whole = f"Plan.zero(2, {plan.dp})" if plan.dp > 1 else "Plan.serial()"
    if transformed and gathers:
        return Rejection(
            f"{plan}: the forward calls {transformed} within a transform of torch.func (vmap, grad or jvp), on whose "
            f"tensors zero=3 cannot gather the layer's parameters. What works: {whole}, which keeps them whole; or to "
            "call the layer on the whole batch"
        )
    if differentiated and (gathers or recomputes):
        why = (
            f"under recompute={plan.recompute!r} what autograd saved is computed again when the forward is over"
            if recomputes
            else "zero=3 has dropped that layer's parameters by then"
        )
        return Rejection(
            f"{plan}: the forward computes gradients of what {differentiated} returned (torch.autograd.grad), and "
            f"{why}. What works: {whole}, without recomputation"
        )
    if written and (gathers or plan.pp > 1):
        return Rejection(
            f"{plan}: the forward writes into the parameter {written}, and not every rank has all of it. What works: "
            "to write between steps, cluster.train(..., on_step=...); to compute with a changed copy, such as "
            f"parameter.clamp(0, 2); or {whole}"
        )
    if returned and gathers:
        return Rejection(
            f"{plan}: the model returns the parameter {returned}, and zero=3 has dropped it when the loss looks at it. "
            "What works: to compute in the forward what the loss needs of it, such as parameter.square().sum(); weight "
            f"decay in the optimizer, in place of a penalty; or {whole}, which keeps parameters whole"
        )
    return None


def _observe(task: Task) -> tuple[str, str, str, str]:
    """Return layers that are transformed and differentiated, and parameters that are written into and returned."""
    transformed, differentiated, made = list[str](), list[str](), list[Any]()
    mode = FakeMode()
    with quiet(), mode:
        model = without_content(task.model, mode)
        for name, layer in model.named_modules():
            if next(layer.parameters(recurse=False), None) is not None:
                _watch_layer(name, layer, transformed, differentiated)
        versions = {name: parameter._version for name, parameter in model.named_parameters()}
        inputs = map_tensors(mode.from_tensor, task.batch[0])
        try:
            made = flatten(call(model, inputs, first=True))[0]
        except Exception as error:
            if not needs_content(error):
                raise
    written = [name for name, parameter in model.named_parameters() if parameter._version != versions[name]]
    storages = {leaf.untyped_storage()._cdata for leaf in made if isinstance(leaf, Tensor)}
    returned = [name for name, p in model.named_parameters() if p.untyped_storage()._cdata in storages]
    return tuple(next(iter(found), "") for found in (transformed, differentiated, written, returned))  # type: ignore[return-value]


def _watch_layer(name: str, layer: nn.Module, transformed: list[str], differentiated: list[str]) -> None:
    def note_transform(*_: Any) -> None:
        if peek_interpreter_stack() is not None:
            transformed.append(name)

    def watch_output(_: nn.Module, __: Any, output: Any) -> None:
        for leaf in flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: differentiated.append(name))

    layer.register_forward_pre_hook(note_transform)
    layer.register_forward_hook(watch_output)

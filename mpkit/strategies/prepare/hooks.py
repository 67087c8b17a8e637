"""Checks whether training in parts can run a model's hooks.

    on modules       forward hooks are sent with the model and run where it does; backward hooks see the gradients of
                     a micro-batch's samples on one rank
    on parameters    pickling drops them, so they are sent separately; they see the gradients of one backward
    on all modules   they exist in this process only, and ranks are other processes: refused
    on state dicts   ranks return their parts of the state by name: refused if they change its entries

A hook that sees gradients in parts is correct if its effects on the parts add up to its effect on the whole. This is
tried on a few samples, with gradients of several sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.process_wide import LOCK
from mpkit.common.torch_private import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from mpkit.plan.plan import Plan
from mpkit.strategies.data.microbatch import Value, batch_size, map_tensors, part
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.models.hooks import (
    Hook,
    backward_hooks,
    describe_wrappers,
    hook_name,
    parameter_hooks,
    register,
)
from mpkit.strategies.models.nested_values import flatten
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.prepare.dry_run.copies import copy_model
from mpkit.strategies.stage.stage import call

__all__ = ["check_global_hooks", "check_gradient_hooks", "check_state_hooks", "check_wrapped_layers"]

SIZES = (1.0, 1e-6, 1e6)
"""Sizes of gradients: a hook with a threshold between the smallest and the largest is detected."""

SAMPLES = 4


def check_global_hooks() -> None:
    """Check that no hook is registered on all modules.

    Raises:
        ValueError: there is such a hook.
    """
    kinds = {
        "register_module_forward_pre_hook": _global_forward_pre_hooks,
        "register_module_forward_hook": _global_forward_hooks,
        "register_module_full_backward_pre_hook": _global_backward_pre_hooks,
        "register_module_full_backward_hook": _global_backward_hooks,
    }
    with LOCK:  # another thread that counts FLOPs has such hooks for a moment
        found = [(kind, hook) for kind, hooks in kinds.items() for hook in hooks.values()]
    for kind, hook in found:
        raise ValueError(
            f"A hook on all modules ({hook_name(hook)}, by torch.nn.modules.module.{kind}) is set in this process, "
            "and ranks are processes of their own, without it. What works: register it on the model's modules, "
            f"for layer in model.modules(): layer.{kind.replace('_module_', '_')}(hook), and take this one away: "
            "handle.remove()"
        )


def check_gradient_hooks(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject hooks that would see parts of a gradient and make something else of them than of the whole."""
    plan, model = resolved.plan, task.given_model
    on_modules, on_parameters = backward_hooks(model), parameter_hooks(model)
    hooks = [*on_parameters, *on_modules]
    once = plan.ranks == 1 and plan.microbatches == 1 and not plan.zero and plan.precision == "full"
    if not hooks or once:
        return None
    after = next((hook for hook in on_parameters if "accumulate" in hook.kind), None)
    if after is not None:
        return _rejection(
            after, plan, "is called after each micro-batch's backward, on gradients that are not complete"
        )
    if plan.tp * plan.cp > 1:
        return _rejection(hooks[0], plan, "sees the gradient of a part of a layer or of a sequence")
    if plan.precision == "fp16":
        return _rejection(hooks[0], plan, "sees gradients that are multiplied by the loss scale")
    if on_modules and any(action.kind == "W" for row in resolved.schedule.rows for action in row):
        return _rejection(
            on_modules[0],
            plan,
            "is called when a module's backward is done, which this schedule does in two halves",
        )
    if not _adds_up(model, on_parameters, task.batch[0]):
        why = (
            "(or another one) makes of the gradients of a batch's parts something that does not add up to what it "
            "makes of those of the whole batch"
        )
        return _rejection(hooks[0], plan, why)
    return None


def check_wrapped_layers(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject hooks and wrappers around a layer's forward that may see a part of its features or tokens."""
    plan, tensor = resolved.plan, resolved.sharded[0].plan
    if plan.tp * plan.cp == 1:
        return None
    regions = [
        [*region.column, *([region.row] if region.row is not None else [])] for region in tensor.regions
    ]
    for name, module in task.model.named_modules():
        what = describe_wrappers(module, name)
        within = [
            [f"{layer}.".startswith(f"{name}." if name else "") and layer != name for layer in r]
            for r in regions
        ]
        has_whole_regions = all(all(each) or not any(each) for each in within) and any(map(any, within))
        if what is None or (has_whole_regions and plan.cp == 1 and not plan.sequence_parallel):
            continue
        part = (
            "a part of each sequence" if plan.cp > 1 or plan.sequence_parallel else "a part of the features"
        )
        return Rejection(
            f"{plan}: {what} may be given {part}, since ranks share layers and sequences. What works: it on a module "
            f"around whole transformer blocks or on the model, with cp=1; or a plan without tp and cp, such as "
            f"Plan.ddp({plan.ranks})"
        )
    return None


def _rejection(hook: Hook, plan: Plan, why: str) -> Rejection:
    said = str(hook)
    return Rejection(
        f"{said[0].upper()}{said[1:]} {why}: {plan} would train something else than plain PyTorch. What works: "
        "Plan.serial(), with one backward a step; or no such hook. max_grad_norm=1.0 in train() clips by the norm of "
        "all gradients, and an optimizer whose step changes gradients has complete ones."
    )


def _adds_up(model: nn.Module, hooks: list[Hook], inputs: Value) -> bool:
    """Return whether the gradients of some samples are the sums of each sample's gradients, whatever their size."""
    count = min(batch_size(inputs), SAMPLES)
    everything = slice(0, count)
    gradients = [_gradients(model, hooks, inputs, [everything], size) for size in SIZES]
    parts = _gradients(model, hooks, inputs, [slice(i, i + 1) for i in range(count)], 1.0)
    if any(gradient is None for gradient in (*gradients, parts)):
        return False  # no output has a batch dimension: unknown
    return all(_are_alike(gradients[0], gradient) for gradient in (*gradients[1:], parts))


def _are_alike(ones: Any, others: Any) -> bool:
    if ones.keys() != others.keys():
        return False
    most = max((float(g.abs().max()) for g in ones.values() if g.numel()), default=0.0)
    eps = max((torch.finfo(g.dtype).eps for g in ones.values()), default=0.0)
    return all(float((g - others[n]).abs().max()) <= 1e3 * eps * most for n, g in ones.items() if g.numel())


def _gradients(
    model: nn.Module, hooks: list[Hook], inputs: Value, parts: list[slice], size: float
) -> dict[str, Tensor] | None:
    """Return the gradients of a sum over samples that is scaled by `size`, divided by `size` again."""
    model = copy_model(model).eval()
    register(hooks, dict(model.named_parameters()))
    for which in parts:
        outputs = call(model, map_tensors(torch.clone, part(inputs, which)), first=True)
        rows = list(_of_samples(outputs, which.stop - which.start))
        if not rows:
            return None
        sum(((row * _weights(row, which.start)).sum() * size for row in rows), torch.zeros(())).backward()
    return {name: p.grad / size for name, p in model.named_parameters() if p.grad is not None}


def _of_samples(outputs: Any, count: int) -> Iterator[Tensor]:
    for leaf in flatten(outputs)[0]:
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dim() and leaf.shape[0] == count:
            yield leaf


def _weights(row: Tensor, first: int) -> Tensor:
    """Return a weight for each element of each sample, independent of the sample's place in the batch."""
    each = row[0].numel()
    numbers = torch.arange(first * each, (first + len(row)) * each, dtype=torch.float64)
    return torch.cos(numbers * 0.7 + 0.2).to(row.dtype).view(row.shape)


# ---- state dicts ---------------------------------------------------------------------------------------------


def check_state_hooks(_: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject hooks that add, rename, drop or replace entries of the model's state dict."""
    model = task.model
    hooks = [
        (name, function)
        for name, module in model.named_modules()
        for function in (*module._state_dict_pre_hooks.values(), *module._state_dict_hooks.values())
    ]
    if not hooks:
        return None
    state, plain = model.state_dict(keep_vars=True), dict[str, Tensor]()
    for prefix, module in model.named_modules(remove_duplicate=False):
        begin = f"{prefix}." if prefix else ""
        kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        plain |= {
            f"{begin}{key}": value for key, value in (module._parameters | kept).items() if value is not None
        }
    changed = [key for key in state.keys() | plain.keys() if state.get(key) is not plain.get(key)]
    changed = [key for key in changed if not key.endswith("_extra_state")]
    if changed:
        where, function = hooks[0]
        return Rejection(
            f"The state-dict hook {hook_name(function)} of {where or 'the model'} changes entries of the state dict "
            f"({', '.join(sorted(changed)[:3])}), which ranks give by the names and in the shapes of parameters and "
            "buffers. What works: take the hook away (handle.remove()), and change the result: run.state_dict()"
        )
    return None

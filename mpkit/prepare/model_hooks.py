"""Hooks of a model, and whether training in parts can run them.

    on modules       around a forward: they travel with the model, and run where it does. Around a backward: they see
                     the gradients of a micro-batch's samples on one rank
    on parameters    pickling drops them: they are sent beside the model, and see the gradients of one backward
    on all modules   of this process only, and ranks are others: refused
    on state dicts   ranks give their parts of the state by name: refused if they change what there is

A hook that sees gradients in parts is right if what it does to parts adds up to what it does to the whole. That is
tried on a few samples, with gradients of several sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from mpkit.models.hooks import Hook, around, backward_hooks, hook_name, parameter_hooks, register
from mpkit.parallel.anymodel.structure import flatten
from mpkit.parallel.microbatch import Value, batch_size, map_tensors, part
from mpkit.parallel.stage import call
from mpkit.plan import Plan
from mpkit.prepare.copying import copied
from mpkit.schedule import build
from mpkit.tensor_plan import TensorPlan

__all__ = ["check_hooks", "check_no_global_hooks", "check_state_hooks", "check_whole"]

SIZES = (1.0, 1e-6, 1e6)
"""Of gradients: a threshold between the smallest and the largest shows."""

SAMPLES = 4


def check_no_global_hooks() -> None:
    """No hook is on all modules.

    Raises:
        ValueError: there is one.
    """
    kinds = {
        "register_module_forward_pre_hook": torch_modules._global_forward_pre_hooks,
        "register_module_forward_hook": torch_modules._global_forward_hooks,
        "register_module_full_backward_pre_hook": torch_modules._global_backward_pre_hooks,
        "register_module_full_backward_hook": torch_modules._global_backward_hooks,
    }
    for kind, hooks in kinds.items():
        for hook in hooks.values():
            raise ValueError(
                f"A hook on all modules ({hook_name(hook)}, by torch.nn.modules.module.{kind}) is set in this process, "
                "and ranks are processes of their own, without it. What works: register it on the model's modules, "
                f"for layer in model.modules(): layer.{kind.replace('_module_', '_')}(hook), and take this one away: "
                "handle.remove()"
            )


def check_hooks(model: nn.Module, inputs: Value, plan: Plan) -> list[Hook]:
    """Whether a plan can run a model's hooks on gradients; returns those on parameters, which are sent apart.

    Args:
        model: whole.
        inputs: of a batch.
        plan: of the training.

    Raises:
        ValueError: it cannot.
    """
    on_modules, on_parameters = backward_hooks(model), parameter_hooks(model)
    hooks = [*on_parameters, *on_modules]
    if not hooks:
        return []
    once = plan.ranks == 1 and plan.microbatches == 1 and not plan.zero and plan.precision == "full"
    if once:
        return on_parameters
    after = next((hook for hook in on_parameters if "accumulate" in hook.kind), None)
    if after is not None:
        raise _refused(
            after, plan, "is called after each micro-batch's backward, on gradients that are not complete"
        )
    if plan.tp * plan.cp > 1:
        raise _refused(hooks[0], plan, "sees the gradient of a part of a layer or of a sequence")
    if plan.precision == "fp16":
        raise _refused(hooks[0], plan, "sees gradients that are multiplied by the loss scale")
    if on_modules and any(action.kind == "W" for row in build(plan).rows for action in row):
        raise _refused(
            on_modules[0],
            plan,
            "is called when a module's backward is done, which this schedule does in two halves",
        )
    if not _adds_up(model, on_parameters, inputs):
        why = (
            "(or another one) makes of the gradients of a batch's parts something that does not add up to what it "
            "makes of those of the whole batch"
        )
        raise _refused(hooks[0], plan, why)
    return on_parameters


def check_whole(model: nn.Module, plan: Plan, tensor: TensorPlan) -> None:
    """What is done around a layer's forward sees all of its features and tokens.

    Args:
        tensor: the layers that are divided.

    Raises:
        ValueError: it may see a part of them.
    """
    if plan.tp * plan.cp == 1:
        return
    regions = [
        [*region.column, *([region.row] if region.row is not None else [])] for region in tensor.regions
    ]
    for name, module in model.named_modules():
        what = around(module, name)
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
        raise ValueError(
            f"{plan}: {what} may be given {part}, since ranks share layers and sequences. What works: it on a module "
            f"around whole transformer blocks or on the model, with cp=1; or a plan without tp and cp, such as "
            f"Plan.ddp({plan.ranks})"
        )


def _refused(hook: Hook, plan: Plan, why: str) -> ValueError:
    said = str(hook)
    return ValueError(
        f"{said[0].upper()}{said[1:]} {why}: {plan} would train something else than plain PyTorch. What works: "
        "Plan.serial(), with one backward a step; or no such hook. max_grad_norm=1.0 in train() clips by the norm of "
        "all gradients, and an optimizer whose step changes gradients has complete ones."
    )


def _adds_up(model: nn.Module, hooks: list[Hook], inputs: Value) -> bool:
    """Whether gradients of some samples are the sums of those of each, whatever their size."""
    count = min(batch_size(inputs), SAMPLES)
    everything = slice(0, count)
    gradients = [_gradients(model, hooks, inputs, [everything], size) for size in SIZES]
    parts = _gradients(model, hooks, inputs, [slice(i, i + 1) for i in range(count)], 1.0)
    if any(found is None for found in (*gradients, parts)):
        return False  # no output is of samples: it cannot be told
    return all(_alike(gradients[0], found) for found in (*gradients[1:], parts))


def _alike(ones: Any, others: Any) -> bool:
    if ones.keys() != others.keys():
        return False
    most = max((float(g.abs().max()) for g in ones.values() if g.numel()), default=0.0)
    eps = max((torch.finfo(g.dtype).eps for g in ones.values()), default=0.0)
    return all(float((g - others[n]).abs().max()) <= 1e3 * eps * most for n, g in ones.items() if g.numel())


def _gradients(
    model: nn.Module, hooks: list[Hook], inputs: Value, parts: list[slice], size: float
) -> dict[str, Tensor] | None:
    """Of a sum over samples, times `size`; divided by it again."""
    model = copied(model).eval()
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
    """Of each number of each sample, the same wherever the sample is."""
    each = row[0].numel()
    numbers = torch.arange(first * each, (first + len(row)) * each, dtype=torch.float64)
    return torch.cos(numbers * 0.7 + 0.2).to(row.dtype).view(row.shape)


# ---- state dicts ---------------------------------------------------------------------------------------------


def check_state_hooks(model: nn.Module) -> None:
    """The hooks on a model's state dict leave it as it is.

    Raises:
        ValueError: one of them adds, renames, drops or replaces an entry.
    """
    found = [
        (name, function)
        for name, module in model.named_modules()
        for function in (*module._state_dict_pre_hooks.values(), *module._state_dict_hooks.values())
    ]
    if not found:
        return
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
        where, function = found[0]
        raise ValueError(
            f"The state-dict hook {hook_name(function)} of {where or 'the model'} changes entries of the state dict "
            f"({', '.join(sorted(changed)[:3])}), which ranks give by the names and in the shapes of parameters and "
            "buffers. What works: take the hook away (handle.remove()), and change the result: run.state_dict()"
        )

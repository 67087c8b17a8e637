"""The checks: what is rejected before a rank starts, because nothing later would say it, or not as well.

Each check reads the `ResolvedPlan` and the `Task`, computes nothing, and stays for one of three reasons:

    blind      the run's proof cannot see it
    obscure    without it the run ends in an error that nobody understands
    common     it is a frequent mistake, and models too large to be proved make it too

The proof stops everything else that would not be serial training in step 1, and says why
(`mpkit.strategies.proof.causes`). Rejected earlier: arguments of wrong types and values (`arguments`), and whatever the
plan cannot be resolved for, such as more stages than layers (`resolve`). docs/checks.md has an example of each row.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mpkit.common.torch_private import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from mpkit.plan.rules import call_of
from mpkit.plan.schedule import Schedule
from mpkit.plan.schedule.catalogue import GPIPE
from mpkit.strategies.data.microbatch import Value, batch_size
from mpkit.strategies.experts.divide import find_balanced
from mpkit.strategies.job.job import ResolvedPlan
from mpkit.strategies.loss.whole_batch import WholeBatchLoss
from mpkit.strategies.models.experts import MixtureOfExperts
from mpkit.strategies.models.hooks import backward_hooks, hook_name, parameter_hooks
from mpkit.strategies.replicas.batchnorm import batch_norms

Key = TypeVar("Key", str, int)


class Task(NamedTuple):
    """What is to be trained, as the checks see it."""

    model: nn.Module  # on the CPU, as it is sent to the ranks
    given_model: nn.Module  # the same model as the user has it
    sizes: list[tuple[Value, Value]]  # a batch of every size that occurs
    listed: bool  # whether `sizes` holds every batch
    loss: Callable[[Any, Any], Any]  # as the user gave it
    counts: bool  # whether ranks call the loss as (total, count)


class Check(NamedTuple):
    """A row of the table."""

    name: str  # the heading of its section in docs/checks.md
    why: str  # the run would not say it: "blind", "obscure" or "common"
    # Returns why it is rejected and what would work; None if there is nothing to reject.
    find: Callable[[ResolvedPlan, Task], str | None]


def find_rejection(resolved: ResolvedPlan, task: Task) -> str | None:
    """Return the first check's rejection; None if all pass."""
    return next(filter(None, (check.find(resolved, task) for check in CHECKS)), None)


def raise_rejection(why: str | None) -> None:
    """Raise a rejection as a ValueError; None is not a rejection."""
    if why is not None:
        raise ValueError(why)


def _in_code(name: str) -> str:
    """Return the Python expression for a module of the model.

    >>> _in_code(""), _in_code("head.0")
    ('model', "model.get_submodule('head.0')")
    """
    return f"model.get_submodule({name!r})" if name else "model"


# ---- shared memory -------------------------------------------------------------------------------------------


def check_shared_memory(_: ResolvedPlan, task: Task) -> str | None:
    """Reject trained parameters whose memory another parameter or a buffer sees: a rank's copies would be separate."""
    return find_shared_memory(task.given_model)


def find_shared_memory(model: nn.Module) -> str | None:
    """Reject a trained parameter that changes, in plain PyTorch, whenever another tensor of the model does.

    Copies of a model keep one shared object, but make two tensors of two objects in the same memory. The proof is blind
    to it: its copy separates them too.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = nn.Parameter(model[0].weight.data.t())
    >>> find_shared_memory(model).split(":")[0]
    '1.weight and 0.weight of the model are different tensors in the same memory'
    """
    named = dict((*model.named_parameters(), *model.named_buffers()))
    pair = find_overlap(named)
    if pair is None:
        return None
    (name, tensor), (other_name, other) = ((key, named[key]) for key in pair)
    where, _, attribute = other_name.rpartition(".")
    alike = (tensor.shape, tensor.stride()) == (other.shape, other.stride())
    tied = f"the same parameter in both places, {_in_code(where)}.{attribute} = model.get_parameter({name!r})"
    separate = f"to compute {other_name} from {name} in the forward"
    return (
        f"{other_name} and {name} of the model are different tensors in the same memory: in plain PyTorch an update of "
        "one changes the other, and ranks hold copies, of which each is updated by itself. What works: "
        f"{tied if isinstance(other, nn.Parameter) and alike else separate}; or a copy, if they are to be separate: "
        f".detach().clone() where {other_name} is made"
    )


def find_overlap(named: Mapping[Key, Tensor]) -> tuple[Key, Key] | None:
    """Return the names of two tensors, one of them trained, that share an element; None if no two do.

    >>> flat = torch.zeros(8, requires_grad=True)
    >>> find_overlap({"a": flat[:4], "b": flat[4:]}), find_overlap({"a": flat[:4], "b": flat[3:]})
    (None, ('a', 'b'))
    """
    storages: dict[int, list[Key]] = {}
    for name, tensor in named.items():
        if tensor.layout is torch.strided and tensor.numel():
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in storages.values():
        for one, other in combinations(names, 2):
            trained = named[one].requires_grad or named[other].requires_grad
            if trained and _overlap(named[one], named[other]):
                return one, other
    return None


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same storage have an element in common."""
    begins = [each.storage_offset() * each.itemsize for each in (one, other)]
    ends = [begin + _extent(each) for begin, each in zip(begins, (one, other), strict=True)]
    if max(begins) >= min(ends):
        return False
    if one.itemsize != other.itemsize:
        return True
    seen = torch.zeros(max(ends) // one.itemsize, dtype=torch.bool)
    seen.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(seen.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to its last one."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.itemsize


# ---- layers --------------------------------------------------------------------------------------------------


def check_embeddings(resolved: ResolvedPlan, task: Task) -> str | None:
    """Reject embeddings with sparse gradients, and those that scale rows where several ranks look rows up."""
    mesh = resolved.mesh
    return find_wrong_embedding(task.model, shared=mesh.dp * mesh.cp * mesh.tp > 1)


def find_wrong_embedding(model: nn.Module, *, shared: bool, local: bool = False) -> str | None:
    """Reject embeddings whose gradients cannot be sent, or whose forward writes into rows.

    Args:
        shared: whether ranks look up different rows of the same table, or hold parts of it.
        local: whether each rank computes the mean loss of its own samples, in a loop of the user's.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        who, where = f"The model's {name or type(module).__name__}", _in_code(name)
        if module.sparse:
            return (
                f"{who} makes sparse gradients (sparse=True), and ranks keep, sum and send dense ones. The same "
                f"numbers without: {where}.sparse = False"
            )
        if shared and module.max_norm is not None:
            return (
                f"{who} scales the rows that it looks up in its forward (max_norm={module.max_norm}), and each rank "
                f"would scale its own rows only. Without: {where}.max_norm = None; in a loop of your own, scale all "
                f"rows after a step: {where}.weight.data.renorm_(2, 0, {module.max_norm})"
            )
        if shared and local and module.scale_grad_by_freq:
            return (
                f"{who} divides gradients by how often a row occurs in the batch (scale_grad_by_freq=True), and each "
                f"rank would count in its own part. Without: {where}.scale_grad_by_freq = False"
            )
    return None


def check_compiled(resolved: ResolvedPlan, task: Task) -> str | None:
    """Reject compiled modules where layers communicate, or parameters are gathered and freed."""
    plan = resolved.plan
    if plan.zero < 3 and plan.tp * plan.cp == 1:
        return None
    for name, module in task.model.named_modules():
        if type(module).__name__ == "OptimizedModule":
            why = (
                "ZeRO-3 gives a layer its parameters for the time of its forward and backward only"
                if plan.zero == 3
                else "the ranks of a divided layer communicate within it"
            )
            zero_2 = plan.zero == 3 and plan.dp > 1
            works = f"Plan.zero(2, {plan.dp})" if zero_2 else f"Plan.ddp({plan.ranks})"
            return (
                f"{plan}: {name or 'the model'} is compiled (torch.compile), and {why}, which compiled code does not "
                f"see. What works: {works}; or without torch.compile: {_in_code(name)}._orig_mod"
            )
    return None


def check_batchnorms(resolved: ResolvedPlan, task: Task) -> str | None:
    """Reject BatchNorms whose statistics cannot be those of the whole batch, where the plan wants that."""
    plan = resolved.plan
    divided = plan.dp > 1 or plan.microbatches > 1
    norms = batch_norms(task.model) if divided and plan.batchnorm == "sync" else {}
    if norms and plan.microbatches > 1:
        return (
            f"{plan}: {next(iter(norms)) or 'the model'} is a {type(next(iter(norms.values()))).__name__}, and would "
            f"take its statistics over each of {plan.microbatches} micro-batches, not over the whole batch as serial "
            "training does. What works: microbatches=1; a norm that looks at single samples, such as nn.GroupNorm; or, "
            "if other statistics are meant, batchnorm='local' in the Plan."
        )
    sizes = [batch_size(inputs) for inputs, _ in task.sizes]
    i = min(range(len(sizes)), key=lambda i: sizes[i])
    if norms and sizes[i] < plan.dp:
        first = next(iter(norms))
        whole = task.listed or not i
        instead = "" if whole else " (drop_last=True in mk.Batches leaves it out)"
        return (
            f"{plan}: the {plan.dp} ranks take statistics over the whole batch for {first or 'the model'}, and "
            f"of a batch of {sizes[i]}{instead} some rank has no sample. Take "
            f"batches of {plan.dp} or more, batchnorm='local' in the Plan, or a norm that needs no batch: nn.GroupNorm."
        )
    return None


# ---- hooks ---------------------------------------------------------------------------------------------------


def check_global_hooks() -> None:
    """Raise a ValueError if a hook is registered on all modules."""
    kinds = {
        "register_module_forward_pre_hook": _global_forward_pre_hooks,
        "register_module_forward_hook": _global_forward_hooks,
        "register_module_full_backward_pre_hook": _global_backward_pre_hooks,
        "register_module_full_backward_hook": _global_backward_hooks,
    }
    for kind, hook in ((kind, hook) for kind, hooks in kinds.items() for hook in hooks.values()):
        raise ValueError(
            f"A hook on all modules ({hook_name(hook)}, by torch.nn.modules.module.{kind}) is set in this process, "
            "and ranks are processes of their own, without it. What works: register it on the model's modules, "
            f"for layer in model.modules(): layer.{kind.replace('_module_', '_')}(hook), and take this one away: "
            "handle.remove()"
        )


def check_gradient_hooks(resolved: ResolvedPlan, task: Task) -> str | None:
    """Reject hooks on gradients that are multiplied by a loss scale."""
    hooks = [*parameter_hooks(task.given_model), *backward_hooks(task.given_model)]
    if not hooks or resolved.plan.precision != "fp16":
        return None
    said = str(hooks[0])
    return (
        f"{resolved.plan}: {said} would see gradients that are multiplied by the loss scale, some 2**16 times as large "
        "as in training without it. What works: precision='bf16', which has no scale; no such hook; max_grad_norm=1.0 "
        "in train(), which clips by the norm of all gradients; or an optimizer whose step changes gradients"
    )


def check_state_hooks(_: ResolvedPlan, task: Task) -> str | None:
    """Reject hooks that add, rename, drop or replace entries of the model's state dict."""
    model = task.model
    hooks = [
        (name, function) for name, module in model.named_modules()
        for function in (*module._state_dict_pre_hooks.values(), *module._state_dict_hooks.values())
    ]  # fmt: skip
    if not hooks:
        return None
    state = model.state_dict(keep_vars=True)
    plain: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        held = ((k, value) for k, value in (module._parameters | kept).items() if value is not None)
        plain |= {f"{prefix}.{key}".removeprefix("."): value for key, value in held}
    changed = [key for key in state.keys() | plain.keys() if state.get(key) is not plain.get(key)]
    changed = [key for key in changed if not key.endswith("_extra_state")]
    if not changed:
        return None
    where, function = hooks[0]
    return (
        f"The state-dict hook {hook_name(function)} of {where or 'the model'} changes entries of the state dict "
        f"({', '.join(sorted(changed)[:3])}), which ranks give by the names and in the shapes of parameters and "
        "buffers. What works: take the hook away (handle.remove()), and change the result: run.state_dict()"
    )


# ---- outputs and loss ----------------------------------------------------------------------------------------


def check_gathered_outputs(resolved: ResolvedPlan, _: Task) -> str | None:
    """Reject outputs that rank 0 cannot gather (DP): their first dimension is not the batch."""
    plan = resolved.plan
    if plan.dp == 1 or plan.data_parallel != "dp":
        return None
    for key, layers in resolved.numbers.items():
        assert isinstance(key, tuple)
        samples, output = key[0][1][0], layers[-2].output
        if output is None or any(spec.shape[:1] != (samples,) for spec in output.specs):
            made = "neither a tensor nor a tuple of tensors" if output is None else f"{output}"
            return (
                f"{plan}: DP gathers the outputs of all ranks in their first dimension, which has to be the batch, and "
                f"of {samples} sample{'s' * (samples > 1)} the model makes {made}. Either let it return a tensor "
                f"(batch, ...) or a tuple of such, or Plan.ddp({plan.dp}), which gathers none."
            )
    return None


def check_whole_batch_loss(resolved: ResolvedPlan, task: Task) -> str | None:
    """Reject losses of the whole batch where a rank does not see all of it at once."""
    plan = resolved.plan
    if not isinstance(task.loss, WholeBatchLoss):
        return None
    if plan.microbatches > 1:
        return (
            f"{plan}: mk.whole_batch_loss needs all samples at once, and of {plan.microbatches} micro-batches the "
            "first ones are over before the last one begins: microbatches=1 in the Plan (schedule='naive')."
        )
    if plan.cp > 1:
        return (
            f"{plan}: mk.whole_batch_loss gathers samples, and with cp={plan.cp} each rank has a part of every "
            f"sequence: cp=1, as in mk.Plan.ddp({plan.ranks})."
        )
    return None


# ---- experts -------------------------------------------------------------------------------------------------


def check_balanced_routing(resolved: ResolvedPlan, task: Task) -> str | None:
    """Reject plans under which a router's losses would not be those of the whole batch."""
    for name, layer in find_balanced(task.model).items():
        for why, works in _obstacles(layer, resolved, task):
            given = ", ".join(f"{key}={value}" for key, value in layer.balance_options.items())
            return f"{resolved.plan}: {name or 'the layer'} has {given}, and {why}. What works: {works}"
    return None


def _obstacles(layer: MixtureOfExperts, resolved: ResolvedPlan, task: Task) -> Iterator[tuple[str, str]]:
    """Yield why a layer cannot be trained under a plan, and a plan under which it can."""
    plan, schedule = resolved.plan, resolved.schedule
    if plan.dp > 1 and plan.data_parallel == "dp":
        yield "nn.DataParallel's replicas know nothing of each other", call_of(plan, {"data_parallel": "ddp"})
    # ---- auxiliary loss: a layer's backwards need the rows of all its forwards
    naive = {"schedule": GPIPE, "virtual_stages": 1}
    if layer.aux_loss and not _has_forwards_first(schedule):
        yield (
            f"an auxiliary loss counts the rows of the whole batch, but backwards begin before the last forward of "
            f"{plan.microbatches} micro-batches",
            call_of(plan, naive if plan.pp > 1 else {"microbatches": 1}),
        )
    # ---- both losses: their gradients are those of a mean over tokens, and so has to be the loss of the outputs
    if task.counts and (layer.aux_loss or layer.z_loss):
        yield (
            "the gradients of a router's losses are those of a mean over tokens, but those of the outputs' loss "
            "(total, count) are divided by a count that is known after the last forward",
            "Plan.serial()",
        )


def _has_forwards_first(schedule: Schedule) -> bool:
    """Return whether each stage begins its backwards after all its forwards."""
    for row in schedule.rows:
        last_forward = {action.stage: i for i, action in enumerate(row) if action.kind == "F"}
        if any(a.kind in ("B", "I") and i < last_forward.get(a.stage, -1) for i, a in enumerate(row)):
            return False
    return True


CHECKS = (
    Check("shared memory", "blind", check_shared_memory),
    Check("embeddings", "obscure", check_embeddings),
    Check("compiled modules", "obscure", check_compiled),
    Check("BatchNorm", "common", check_batchnorms),
    Check("hooks on scaled gradients", "blind", check_gradient_hooks),
    Check("hooks on the state dict", "blind", check_state_hooks),
    Check("gathered outputs", "obscure", check_gathered_outputs),
    Check("loss of the whole batch", "common", check_whole_batch_loss),
    Check("balanced routing", "obscure", check_balanced_routing),
)

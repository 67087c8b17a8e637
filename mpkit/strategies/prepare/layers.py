"""Checks of single layers, which ranks or micro-batches would not train as one process does with the whole batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from mpkit.common.process_wide import LOCK
from mpkit.strategies.data.microbatch import batch_size
from mpkit.strategies.job.feed import WholeBatches
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.prepare.dry_run.copies import copy_model
from mpkit.strategies.replicas.batchnorm import batch_norms, has_own_forward

__all__ = [
    "check_batchnorms",
    "check_compiled",
    "check_computed_weights",
    "check_embeddings",
    "find_wrong_embedding",
]


def in_code(name: str) -> str:
    """Return the Python expression for a module of the model.

    >>> in_code(""), in_code("head.0")
    ('model', "model.get_submodule('head.0')")
    """
    return f"model.get_submodule({name!r})" if name else "model"


# ---- embeddings ----------------------------------------------------------------------------------------------


def check_embeddings(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject embeddings with sparse gradients, and those that scale rows where several ranks look rows up."""
    mesh = resolved.mesh
    return find_wrong_embedding(task.model, shared=mesh.dp * mesh.cp * mesh.tp > 1)


def find_wrong_embedding(model: nn.Module, *, shared: bool, local: bool = False) -> Rejection | None:
    """Reject embeddings that several ranks would not train as one process does.

    Args:
        model: the model.
        shared: whether ranks look up different rows of the same table, or hold parts of it.
        local: whether each rank computes the mean loss of its own samples.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        who = f"The model's {name or type(module).__name__}"
        where = f"model{'.get_submodule(' + repr(name) + ')' if name else ''}"
        if module.sparse:
            return Rejection(
                f"{who} makes sparse gradients (sparse=True), and ranks keep, sum and send dense ones. The same "
                f"numbers without: {where}.sparse = False"
            )
        if shared and module.max_norm is not None:
            return Rejection(
                f"{who} scales the rows that it looks up in its forward (max_norm={module.max_norm}), and each rank "
                f"would scale its own rows only. Without: {where}.max_norm = None; in a loop of your own, scale all "
                f"rows after a step: {where}.weight.data.renorm_(2, 0, {module.max_norm})"
            )
        if shared and local and module.scale_grad_by_freq:
            return Rejection(
                f"{who} divides gradients by how often a row occurs in the batch (scale_grad_by_freq=True), and each "
                f"rank would count in its own part. Without: {where}.scale_grad_by_freq = False"
            )
    return None


# ---- weights that are computed -------------------------------------------------------------------------------


def check_computed_weights(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject weights that depend on state which each forward changes, where a step has several forwards."""
    plan = resolved.plan
    recomputes = plan.recompute not in ("none", "selective")
    if not (recomputes or plan.microbatches > 1):
        return None
    for name, module in task.model.named_modules():
        if module.training and _weight_changes(module):
            several = (
                "recomputation does a forward twice, the second time with another weight"
                if recomputes
                else f"a step has {plan.microbatches} micro-batches, each with another weight"
            )
            return Rejection(
                f"{plan}: {name or 'the model'} ({type(module).__name__}) computes its weight with state that every "
                f"forward changes (spectral_norm's power iteration), and {several}. What works: one micro-batch and "
                f"recompute='none', such as Plan.serial() or Plan.ddp({max(2, plan.ranks)}); or "
                f"{in_code(name)}.eval()"
            )
    return None


def _weight_changes(module: nn.Module) -> bool:
    """Return whether computing a module's weight changes the weight of the next forward."""
    if any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
        return True
    if not nn.utils.parametrize.is_parametrized(module):
        return False
    with LOCK, torch.random.fork_rng(devices=[]), torch.no_grad():
        module = copy_model(module)
        assert isinstance(module.parametrizations, nn.ModuleDict)
        before = [buffer.clone() for buffer in module.parametrizations.buffers()]
        for name in module.parametrizations:
            getattr(module, name)
        return not all(map(torch.equal, before, module.parametrizations.buffers()))


# ---- compiled modules ----------------------------------------------------------------------------------------


def check_compiled(resolved: ResolvedPlan, task: Task) -> Rejection | None:
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
            works = (
                f"Plan.zero(2, {plan.dp})" if plan.zero == 3 and plan.dp > 1 else f"Plan.ddp({plan.ranks})"
            )
            return Rejection(
                f"{plan}: {name or 'the model'} is compiled (torch.compile), and {why}, which compiled code does not "
                f"see. What works: {works}; or without torch.compile: {in_code(name)}._orig_mod"
            )
    return None


# ---- BatchNorm -----------------------------------------------------------------------------------------------


def check_batchnorms(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject BatchNorms whose statistics cannot be those of the whole batch, where the plan wants that."""
    plan, batches = resolved.plan, task.sizes
    divided = plan.dp > 1 or plan.microbatches > 1
    norms = batch_norms(task.model) if divided and plan.batchnorm == "sync" else {}
    if norms and plan.microbatches > 1:
        return Rejection(
            f"{plan}: {next(iter(norms)) or 'the model'} is a {type(next(iter(norms.values()))).__name__}, and would "
            f"take its statistics over each of {plan.microbatches} micro-batches, not over the whole batch as serial "
            "training does. What works: microbatches=1; a norm that looks at single samples, such as nn.GroupNorm; or, "
            "if other statistics are meant, batchnorm='local' in the Plan."
        )
    for name, norm in norms.items():
        if has_own_forward(norm):
            return Rejection(
                f"{plan}: the statistics of BatchNorms are to be over the whole batch, and {name} is a "
                f"{type(norm).__name__}, whose forward is its own and sees its rank's share only. Either "
                "batchnorm='local' in the Plan, each rank's own statistics, or one of torch.nn's in its place."
            )
    sizes = [batch_size(inputs) for inputs, _ in batches]
    i = min(range(len(sizes)), key=lambda i: sizes[i])
    if norms and sizes[i] < plan.dp:
        first = next(iter(norms))
        whole = isinstance(batches, WholeBatches) or not i
        instead = "" if whole else " (drop_last=True in mk.Batches leaves it out)"
        return Rejection(
            f"{plan}: the {plan.dp} ranks take statistics over the whole batch for {first or 'the model'}, and "
            f"of a batch of {sizes[i]}{instead} some rank has no sample. Take "
            f"batches of {plan.dp} or more, batchnorm='local' in the Plan, or a norm that needs no batch: nn.GroupNorm."
        )
    return None

"""Prepare a model to be copied and sent to ranks: on the CPU, and without the graph of an earlier forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from mpkit.common.process_wide import LOCK
from mpkit.plan.plan import Plan
from mpkit.strategies.models.nested import flatten
from mpkit.strategies.prepare.dry_run.copying import copy_model

__all__ = ["check_compiled", "check_embeddings", "check_repeatable", "ready_to_travel", "without_graphs"]


def ready_to_travel(model: nn.Module) -> nn.Module:
    """Return the model itself, or a copy if some of it is on a GPU or belongs to a graph.

    Raises:
        ValueError: the model cannot be copied.
    """
    model = without_graphs(model)
    if all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers())):
        return model
    return copy_model(model).cpu()


def without_graphs(model: nn.Module) -> nn.Module:
    """Return the model itself, or a copy if a tensor that it keeps belongs to a graph.

    A tensor that a module keeps from a forward, as `torch.nn.utils.weight_norm` keeps the weight that it computes, can
    be neither copied nor sent together with its graph.

    Raises:
        ValueError: the model cannot be copied.
    """
    kept = [
        leaf
        for module in model.modules()
        for value in vars(module).values()
        for leaf in flatten(value)[0]
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None
    ]
    if kept:
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        return copy_model(model, memo | {id(tensor): tensor.detach() for tensor in kept})
    return model


def in_code(name: str) -> str:
    """Return the Python expression for a module of the model.

    >>> in_code(""), in_code("head.0")
    ('model', "model.get_submodule('head.0')")
    """
    return f"model.get_submodule({name!r})" if name else "model"


def check_repeatable(model: nn.Module, plan: Plan) -> None:
    """Check that no weight depends on state that each forward changes, where a step has several forwards.

    Raises:
        ValueError: spectral_norm, or a parametrization like it, under micro-batches or recomputation.
    """
    recomputes = plan.recompute not in ("none", "selective")
    if not (recomputes or plan.microbatches > 1):
        return
    for name, module in model.named_modules():
        if module.training and _weight_changes(module):
            several = (
                "recomputation does a forward twice, the second time with another weight"
                if recomputes
                else f"a step has {plan.microbatches} micro-batches, each with another weight"
            )
            raise ValueError(
                f"{plan}: {name or 'the model'} ({type(module).__name__}) computes its weight with state that every "
                f"forward changes (spectral_norm's power iteration), and {several}. What works: one micro-batch and "
                f"recompute='none', such as Plan.serial() or Plan.ddp({max(2, plan.ranks)}); or "
                f"{in_code(name)}.eval()"
            )


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


def check_compiled(model: nn.Module, plan: Plan) -> None:
    """Check that no module is compiled where parameters are gathered and freed.

    Raises:
        ValueError: a module is compiled.
    """
    for name, module in model.named_modules():
        if plan.zero == 3 and type(module).__name__ == "OptimizedModule":
            raise ValueError(
                f"{plan}: {name or 'the model'} is compiled (torch.compile), and ZeRO-3 gives a layer its parameters "
                "for the time of its forward and backward only, which compiled code does not see. What works: "
                f"Plan.zero(2, {plan.dp}); or without torch.compile: {in_code(name)}._orig_mod"
            )


def check_embeddings(model: nn.Module, *, shared: bool, local: bool = False) -> None:
    """Refuse embeddings that several ranks would not train as one process does.

    Args:
        model: the model.
        shared: whether ranks look up different rows of the same table, or hold parts of it.
        local: whether each rank computes the mean loss of its own samples.

    Raises:
        ValueError: there is one; the message names it.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        who = f"The model's {name or type(module).__name__}"
        where = f"model{'.get_submodule(' + repr(name) + ')' if name else ''}"
        if module.sparse:
            raise ValueError(
                f"{who} makes sparse gradients (sparse=True), and ranks keep, sum and send dense ones. The same "
                f"numbers without: {where}.sparse = False"
            )
        if shared and module.max_norm is not None:
            raise ValueError(
                f"{who} scales the rows that it looks up in its forward (max_norm={module.max_norm}), and each rank "
                f"would scale its own rows only. Without: {where}.max_norm = None; in a loop of your own, scale all "
                f"rows after a step: {where}.weight.data.renorm_(2, 0, {module.max_norm})"
            )
        if shared and local and module.scale_grad_by_freq:
            raise ValueError(
                f"{who} divides gradients by how often a row occurs in the batch (scale_grad_by_freq=True), and each "
                f"rank would count in its own part. Without: {where}.scale_grad_by_freq = False"
            )

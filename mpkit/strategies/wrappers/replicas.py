"""The ranks that a wrapper works with, as a communicator, and what can be said before it begins."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.one_rank import OneRank
from mpkit.strategies.comm.own_process import current_communicator
from mpkit.strategies.experts.known_experts import find_balanced
from mpkit.strategies.rank_context import Context
from mpkit.strategies.wrappers.wrapper import ModuleWrapper

__all__ = ["Group", "check_module", "context_for", "replicas_of"]

Group = Communicator | dist.ProcessGroup | DeviceMesh | None
"""The ranks that work together: a communicator, torch's process group, a mesh of one axis, or None for all."""


def context_for(module: nn.Module) -> Context:
    """Return this rank's context, and move the module to the rank's device under `Cluster.run`.

    Raises:
        ValueError: there is no process group, or its backend cannot send tensors from the module's device.
    """
    first = next((*module.parameters(), *module.buffers()).__iter__(), None)
    context = context_on(first.device if first is not None else torch.device("cpu"))
    if first is not None and first.device != context.device:
        module.to(context.device)
    backend = "gloo" if context.comm.wire.gloo else "nccl"
    if context.device.type == "cpu" and not context.comm.wire.gloo and dist.get_backend() == "nccl":
        raise ValueError(
            f"The module is on {context.device}, and the process group's backend {backend} sends from GPUs only: "
            "module.cuda() comes before it is wrapped, or init_process_group('gloo')"
        )
    return context


def context_on(device: torch.device) -> Context:
    """Return this rank's context, for tensors on a device."""
    comm = current_communicator(device)
    return Context(comm.rank, comm.world_size, comm.wire.device, comm, comm.wire.record)


def replicas_of(context: Context, group: Group) -> Communicator:
    """Return the communicator of a group.

    Args:
        context: this rank's context.
        group: the ranks.

    Raises:
        ValueError: it is no group, has several axes, or this rank is not in it.
    """
    comm = context.comm
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            said, one = (f", {names}", f"[{names[0]!r}]") if names else ("", ".get_group(0)")
            raise ValueError(
                f"group is a mesh of {group.ndim} axes{said}, and one axis is wanted: group=mesh{one}"
            )
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(group))
        group = comm if len(ranks) == comm.world_size else comm.adopt(ranks, group)
    if group is not None and not isinstance(group, Communicator):
        raise ValueError(
            f"group={group!r} is {type(group).__name__}: ctx.comm.group([0, 1]), torch.distributed.new_group([0, 1]), "
            "mesh['dp'] of a DeviceMesh, or None for all ranks"
        )
    group = group or comm
    if group.index < 0:
        raise ValueError(
            f"rank {group.rank} is not in the group of ranks {list(group.ranks)}: only its ranks wrap the module"
        )
    return group if group.size > 1 else OneRank(comm.wire)


def check_module(module: nn.Module, what: str, within: tuple[type[ModuleWrapper], ...] = ()) -> nn.Module:
    """Return the module, if it can be wrapped.

    Args:
        module: what was given.
        what: the wrapper's call, for errors: "mk.ddp".
        within: wrappers that may be inside of it.

    Raises:
        ValueError: it is no module, has no parameters to train, is wrapped or divided already, or has experts whose
            routing depends on the whole batch.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{what} takes a module, and was given {type(module).__name__}: {what}(model), where model is a "
            "torch.nn.Module. In Cluster.run the rank's context is not passed on"
        )
    allowed = {p for inner in module.modules() if isinstance(inner, within) for p in inner.parameters()}
    _check_divided([p for p in module.parameters() if p not in allowed], what)
    for name, inner in module.named_modules():
        if isinstance(inner, (ModuleWrapper, DistributedDataParallel)) and not isinstance(inner, within):
            where = f"{name} in it is" if name else "it is"
            raise ValueError(
                f"{what}: {where} wrapped already ({type(inner).__name__}), and its gradients would be reduced "
                f"twice: {what}({'model' if name else 'wrapped'}.module) wraps it in this way instead"
            )
    for name, layer in find_balanced(module).items():
        given = ", ".join(f"{key}={value}" for key, value in layer.balance_options.items())
        raise ValueError(
            f"{what}: {name or 'the module'} has {given}, which depend on all tokens of a batch, and in a loop of your "
            "own no rank knows which batch its samples are of. cluster.train does: "
            f"cluster.train(model, data, mk.Plan(dp=4), ...)"
        )
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        why = "all of its parameters are frozen" if parameters else "it has no parameters"
        raise ValueError(
            f"{what}: {type(module).__name__} has nothing to train ({why}), so there is nothing to keep equal among "
            "ranks. Call it as it is, or let some train: parameter.requires_grad_()"
        )
    return module


def _check_divided(parameters: Iterable[nn.Parameter], what: str) -> None:
    """Check that no parameter is a rank's part of one; `what` is as in `check_module`.

    Raises:
        ValueError: a wrapper has divided them.
    """
    for parameter in parameters:
        if hasattr(parameter, "divided"):
            raise ValueError(
                f"{what}: {parameter.divided[1]} has divided the module already, and {what} would take a rank's parts "
                f"for the whole: norms, clipping and state_dict() would be those of parts. What works: {what}(model) "
                "of a model that no wrapper has divided; with tensor parallelism mk.ddp(mk.tensor_parallel(model, "
                "group=mesh['tp']), group=mesh['dp']), or cluster.train(model, data, mk.Plan(dp=2, tp=2, zero=3), ...)"
            )

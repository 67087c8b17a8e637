"""What the wrappers share: a module around the user's, the ranks that work together, and what is rejected at once.

ModuleWrapper     has the user's module's signature, attributes and names
HeldParameters    the module's parameters have to stay those that were wrapped
ranks_for         this rank, and the ranks of a group, as a communicator
check_module      rejects what cannot be wrapped
"""

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.fake_group import OneRank
from mpkit.strategies.comm.own_process import current_communicator
from mpkit.strategies.experts.divide import find_balanced
from mpkit.strategies.rank_context import Context

Group = Communicator | dist.ProcessGroup | DeviceMesh | None
"""The ranks that work together: a communicator, torch's process group, a mesh of one axis, or None for all."""


class ModuleWrapper(nn.Module):
    """A module that calls another, and is taken for it: attributes, names and signature are those of `module`."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training  # train() would change the modules within, too
        inner = module.forward

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

        self.forward = forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the user's module's attribute, where it is the one that would be read."""
        own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if own or "module" not in self._modules or not hasattr(self._modules["module"], name):
            super().__setattr__(name, value)
        else:
            setattr(self._modules["module"], name, value)

    # ---- names ----------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by the names that they have in the user's module, in its order."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers by the names that they have in the user's module."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module within the user's, by its name there."""
        return self.module.get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's module, by its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of the user's module, by its own names.

        Raises:
            ValueError: `assign` is set, which would replace the parameters that are wrapped.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) replaces the parameters, and it is those that are wrapped: leave "
                "assign=False, or load the state before the module is wrapped"
            )
        return self.module.load_state_dict(state_dict, strict=strict)

    # ---- what would break the wrapping ----------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Refuse to move or cast what is wrapped; `.to` of the device and dtype that it has does nothing."""
        with torch.no_grad():
            for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                new = fn(tensor.detach())
                if new.device != tensor.device or new.dtype != tensor.dtype:
                    raise ValueError(
                        f"{name} is on {tensor.device} in {tensor.dtype}, and was to be moved to {new.device} or cast "
                        f"to {new.dtype}. A wrapped module stays as it is, since its gradients have their place in "
                        "buckets and shards: module.to(...) comes before it is wrapped."
                    )
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} cannot be copied or pickled, since it belongs to this rank's process group. Its "
            "weights can: state_dict(), and load_state_dict() of the model without a wrapper."
        )


class HeldParameters:
    """The parameters of a module as they were when it was wrapped.

    `wrapper` is the call, for errors: "mk.ddp"; `allows_unused` parameters may be frozen while others train.
    """

    def __init__(self, module: nn.Module, wrapper: str, *, allows_unused: bool) -> None:
        self._module, self._wrapper, self._allows_unused = module, wrapper, allows_unused
        self._then = self._now()
        self._trained = {name for name, parameter in self._then.items() if parameter.requires_grad}

    def _now(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))

    def check(self) -> None:
        """Check that none was added, removed, exchanged, unfrozen, or frozen while others train."""
        named, then, wrapper, unused = self._now(), self._then, self._wrapper, "find_unused_parameters=True"
        for name in named | then:
            if named.get(name) is not then.get(name):
                did = "added" if name not in then else "removed" if name not in named else "exchanged"
                raise ValueError(
                    f"{name} was {did} after {wrapper} had wrapped the module, and gradients are synchronized of "
                    f"the parameters that it had: change the module first, then model = {wrapper}(module)"
                )
        trained = {name for name, parameter in named.items() if parameter.requires_grad}
        if late := sorted(trained - self._trained):
            within = f", with {unused}," if wrapper == "mk.ddp" else ""
            raise ValueError(
                f"{late[0]} was frozen when {wrapper} wrapped the module, and trains now: its gradient would not "
                f"be synchronized. Wrap the module while it trains{within} and then freeze it until it is to train"
            )
        if (frozen := sorted(self._trained - trained)) and trained and not self._allows_unused:
            raise ValueError(
                f"{frozen[0]} was frozen after {wrapper} had wrapped the module, and the ranks wait for its "
                f"gradient: {wrapper}(module, {unused}) allows that, or freeze it first"
            )


def ranks_for(module: nn.Module, group: Group = None) -> tuple[Context, Communicator]:
    """Return this rank's context, and a group's communicator; under `Cluster.run` the module moves to the device."""
    first = next(iter((*module.parameters(), *module.buffers())), None)
    comm = current_communicator(first.device if first is not None else torch.device("cpu"))
    context = Context(comm.rank, comm.world_size, comm.wire.device, comm, comm.wire.record)
    if first is not None and first.device != context.device:
        module.to(context.device)
    if context.device.type == "cpu" and not comm.wire.gloo and dist.get_backend() == "nccl":
        raise ValueError(
            f"The module is on {context.device}, and the process group's backend nccl sends from GPUs only: "
            "module.cuda() comes before it is wrapped, or init_process_group('gloo')"
        )
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
    return context, group if group.size > 1 else OneRank(comm.wire)


def check_module(module: nn.Module, what: str, within: tuple[type[ModuleWrapper], ...] = ()) -> None:
    """Check that a module can be wrapped by the call `what`; wrappers of the kinds `within` may be inside of it."""
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{what} takes a module, and was given {type(module).__name__}: {what}(model), where model is a "
            "torch.nn.Module. In Cluster.run the rank's context is not passed on"
        )
    allowed = {p for inner in module.modules() if isinstance(inner, within) for p in inner.parameters()}
    marks = (getattr(p, "divided", None) for p in module.parameters() if p not in allowed)
    if (divided := next(filter(None, marks), None)) is not None:
        raise ValueError(
            f"{what}: {divided[1]} has divided the module already, and {what} would take a rank's parts for the whole: "
            f"norms, clipping and state_dict() would be those of parts. What works: {what}(model) of a model that no "
            "wrapper has divided; with tensor parallelism mk.ddp(mk.tensor_parallel(model, group=mesh['tp']), "
            "group=mesh['dp']), or cluster.train(model, data, mk.Plan(dp=2, tp=2, zero=3), ...)"
        )
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


def checked_prove(wrapper: str, prove: Any, option: str = "prove") -> int:
    """Return the number of steps to prove."""
    if isinstance(prove, bool) or not isinstance(prove, int) or prove < 0:
        raise ValueError(
            f"{wrapper}({option}={prove!r}): {option} is the number of steps, from the first on, that are compared "
            f"with plain PyTorch: {wrapper}(module, ..., {option}=2); 0 compares none"
        )
    return prove

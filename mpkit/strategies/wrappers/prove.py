"""mk.prove: a wrapped module in a loop of one's own, whoever wrapped it, is compared with the plain one."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from mpkit.common.tracebacks import public
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.proof.loop import LoopProof
from mpkit.strategies.proof.plain_module import PlainModule
from mpkit.strategies.proof.ranks import HeldTensors, Ranks
from mpkit.strategies.stage.shard import HeldPart
from mpkit.strategies.wrappers.data_parallel import DataParallel
from mpkit.strategies.wrappers.pipeline import PipelineParallel
from mpkit.strategies.wrappers.tensor_parallel import TensorParallel
from mpkit.strategies.wrappers.wrapper import Group, ModuleWrapper, checked_prove

AROUND = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
"""What torch.compile and torch's checkpoint wrapper put into names."""


@public
def prove(
    module: nn.Module, plain: nn.Module, steps: int = 1, *, group: Group = None, tp: Group = None,
    dtype: torch.dtype | None = None,
) -> LoopProof:  # fmt: skip
    """Compare the first steps of a wrapped module in your own loop with the plain module.

    The wrapped module may be torch's DistributedDataParallel, one that FSDP2's `fully_shard` or `parallelize_module`
    has changed, `mk.ddp` or `mk.tensor_parallel`, or that of a loop that averages gradients by itself. Every rank calls
    this once the module is wrapped, and the loop stays as it is. When `optimizer.step()` begins, the gradients have to
    be the mean over the ranks of the plain module's; when it ends, all ranks have to hold the same weights.

    >>> import copy, mpkit as mk, torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> def train(ctx):
    ...     plain = torch.nn.Linear(4, 1)
    ...     model = DistributedDataParallel(copy.deepcopy(plain))
    ...     mk.prove(model, plain)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     model(torch.full((2, 4), float(ctx.rank))).sum().backward()
    ...     optimizer.step()
    >>> with mk.Cluster(ranks=1, device="cpu") as cluster:
    ...     _ = cluster.run(train)
    [rank 0] mk.prove(DistributedDataParallel): equal to plain PyTorch in step 1: gradients within 0

    Args:
        module: the wrapped module, in which the loop calls forward.
        plain: the same module without a wrapper, in the same mode: `copy.deepcopy(module)` before it is wrapped. It is
            changed: it follows the wrapped one's weights.
        steps: the number of steps that are compared, from the first on.
        group: all ranks that train the module: a communicator, torch's process group, or a DeviceMesh; None for all.
        tp: those of them that share a batch, as under tensor parallelism; None for those of `mk.tensor_parallel`.
        dtype: in which the module computes by FSDP's `MixedPrecisionPolicy`; None elsewhere, also in torch.autocast.

    Returns:
        The proof: `line` is what was found, and `compare()` compares where a loop has no optimizer of torch's.

    Raises:
        ValueError: these are not the same module, or the ranks have different ones.
        NotSerial: on all ranks, in `optimizer.step()`: a step is not that of plain PyTorch.
    """
    _check(module, plain, steps)
    inner, parts, shares = _look_inside(module, steps)
    named = _same_parameters(inner, plain)
    shares = shares if tp is None else _ranks("mk.prove", tp)
    who, synchronizes = f"mk.prove({type(module).__name__})", _synchronizes(module)
    ranks, alone = _ranks(who, group), PlainModule(plain, dtype)
    proof = LoopProof(who, ranks, alone, steps, tp=shares, synchronizes=synchronizes)
    proof.attach(inner, HeldTensors(named, parts, proof.ranks))
    return proof


def _check(module: Any, plain: Any, steps: Any) -> None:
    if not all(isinstance(each, nn.Module) for each in (module, plain)):
        raise ValueError(
            f"mk.prove takes the wrapped module and the plain one, and was given {type(module).__name__} and "
            f"{type(plain).__name__}: plain = copy.deepcopy(module); model = DistributedDataParallel(module); "
            "mk.prove(model, plain)"
        )
    if not checked_prove("mk.prove", steps, "steps"):
        raise ValueError(
            "mk.prove(steps=0) compares nothing: leave it out, or mk.prove(model, plain, steps=2)"
        )


def _look_inside(module: nn.Module, steps: int) -> tuple[nn.Module, dict[str, HeldPart] | None, Ranks | None]:
    """Return the module within the wrappers; of a divided one also what this rank holds, and who holds the rest."""
    inner: nn.Module = module
    parts: dict[str, HeldPart] | None = None
    shares: Ranks | None = None
    while isinstance(inner, (DistributedDataParallel, ModuleWrapper)):
        if isinstance(inner, PipelineParallel):
            raise ValueError(
                "mk.prove of mk.pipeline: its step() is forward, loss and backward at once, which it proves by "
                f"itself: mk.pipeline(module, ..., prove={steps})"
            )
        if isinstance(inner, TensorParallel):
            parts = inner.held_parts()
            shares = Ranks("mk.prove", inner.holders.ranks, inner.holders.handle)
        inner = inner.module
    return inner, parts, shares


def _same_parameters(inner: nn.Module, plain: nn.Module) -> dict[str, nn.Parameter]:
    """Return the wrapped module's parameters by the names in the plain one, which has to have the same."""
    named = {AROUND.sub("", name): parameter for name, parameter in inner.named_parameters()}
    expected = {AROUND.sub("", name) for name, _ in plain.named_parameters()}
    if inner is plain or expected != set(named):
        differ = sorted(expected ^ set(named))
        why = f"{differ[0]} is a parameter of one of them only" if differ else "it is the wrapped one itself"
        raise ValueError(
            f"mk.prove: the plain module is not what was wrapped: {why}. What works: plain = copy.deepcopy(module) "
            "before the module is wrapped, and mk.prove(wrapped, plain)"
        )
    return named


def _synchronizes(module: nn.Module) -> Callable[[], bool]:
    """Return a function that says whether a forward has the first rank's buffers on all ranks."""
    if isinstance(module, DistributedDataParallel):
        return lambda: bool(module.will_sync_module_buffers())
    if isinstance(module, DataParallel):
        return lambda: module.synchronizes
    return lambda: isinstance(module, TensorParallel)


def _ranks(who: str, group: Group) -> Ranks:
    if isinstance(group, Communicator):
        return Ranks(who, group.ranks, group.handle)
    if group is None and not dist.is_initialized():
        return Ranks(who, (0,), None)
    if isinstance(group, DeviceMesh):
        if group.ndim == 1:
            group = group.get_group()
        elif group.size() == dist.get_world_size():
            group = None
        else:
            raise ValueError(
                f"{who}(group=...) is a mesh of {group.ndim} axes and not of all ranks: give torch's process group of "
                "its ranks, torch.distributed.new_group(mesh.mesh.flatten().tolist())"
            )
    return Ranks(who, dist.get_process_group_ranks(group), group)

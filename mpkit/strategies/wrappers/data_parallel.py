"""mk.ddp: distributed data parallelism around a module, as torch's DistributedDataParallel.

forward     as the module's; buffers that have changed are the first rank's
backward    gradients are averaged over the ranks in buckets, while autograd goes on
then        optimizer.step(), on each rank the same

`mpkit.strategies.replicas.ddp` trains: it knows its steps, zeroes its buckets, and sums shares of a batch. Here
gradients stay in `parameter.grad`, as torch's conventions ask, until they are zeroed or dropped, whenever the user
wants; what has accumulated is averaged, and parameters that are already equal stay so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.tracebacks import public
from mpkit.plan.plan import Plan
from mpkit.strategies.models.nested_values import REGISTER, flatten, tensors_inside
from mpkit.strategies.prepare.checks import find_wrong_embedding, raise_rejection
from mpkit.strategies.proof.backwards import ModuleBackwards
from mpkit.strategies.replicas.ddp import DDP
from mpkit.strategies.replicas.part import Holders, ReplicatedPart
from mpkit.strategies.stage.stage import Stage
from mpkit.strategies.wrappers.tensor_parallel import TensorParallel
from mpkit.strategies.wrappers.wrapper import Group, HeldParameters, ModuleWrapper, check_module, ranks_for
from mpkit.trace import Kind


@public
def ddp(
    module: nn.Module, *, bucket_mb: float = 25.0, find_unused_parameters: bool = False, group: Group = None
) -> DataParallel:
    """Wrap a module so that its gradients are averaged over all ranks in each backward, as torch's DDP does.

    Every rank calls this at the same time, in a function that `Cluster.run` calls or under torchrun after
    `init_process_group`. Parameters and buffers become the first rank's. The loop stays as it is: each rank computes
    the mean loss of its own samples, `loss.backward()`, `optimizer.step()`.

    >>> import mpkit as mk
    >>> def train(ctx):
    ...     torch.manual_seed(ctx.rank)  # the first rank's weights count
    ...     model = mk.ddp(nn.Linear(4, 1))
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     for step in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.full((2, 4), float(ctx.rank))).square().mean().backward()
    ...         optimizer.step()
    ...     return model.state_dict()["bias"].item()
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     first, second = cluster.run(train)
    >>> first == second
    True

    Args:
        module: on this rank's device; changed in place.
        bucket_mb: size of a bucket in MiB; torch's `bucket_cap_mb`.
        find_unused_parameters: allow parameters that get no gradient in a backward. One that no rank used has none.
        group: the ranks that hold the same module: a communicator, torch's process group, or a DeviceMesh of one
            axis; None for all.

    Returns:
        The wrapper: `model.module` is the module.

    Raises:
        ValueError: there is no process group, the module has nothing to train, or it is wrapped already.
    """
    check_module(module, "mk.ddp", within=(TensorParallel,))
    return DataParallel(module, bucket_mb, find_unused_parameters, group)


class DataParallel(ModuleWrapper):
    """A module whose gradients are averaged over ranks; made by `mk.ddp`.

    Attributes:
        synchronizes: whether a forward takes the first rank's buffers, and its backward averages; not in `no_sync()`.
    """

    synchronizes: bool

    def __init__(self, module: nn.Module, bucket_mb: float, unused: bool, group: Group) -> None:
        context, replicas = ranks_for(module, group)
        raise_rejection(find_wrong_embedding(module, shared=replicas.size > 1, local=True))
        super().__init__(module)
        self.synchronizes = True
        allows = "allow" if unused else "error"
        plan = Plan(dp=replicas.size, batchnorm="local", bucket_mb=bucket_mb, unused=allows)
        stages = {0: Stage(0, [("", module)], context.device)}
        self._record = context.record
        self._backward: AbstractContextManager[Any] | None = None
        self._op = -1
        # Before the reducer's own hooks, which need a backward that has begun.
        parameters = module.parameters()
        self._backwards = ModuleBackwards(parameters, self._begin, self._end, alone=self._refuse_alone)
        holders, allow = Holders(replicas, replicas), "find_unused_parameters=True in mk.ddp"
        self._sync = _AveragedGradients(ReplicatedPart(context, plan, stages, holders, allow_unused=allow))
        for parameter in module.parameters():
            self._record.ledger.track(parameter, "params")
        self._held = HeldParameters(module, "mk.ddp", allows_unused=unused)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, gradients accumulate on each rank; the next backward outside averages their sum."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; the backward from its output averages gradients."""
        if torch.is_grad_enabled():
            self._held.check()
        if self.synchronizes:
            self._sync.synchronize_buffers()
        op = self._record.begin(Kind.FORWARD, "forward")
        output = self.module(*args, **kwargs)
        self._record.end(op)
        for leaf in flatten(output)[0] if torch.is_grad_enabled() else ():
            for tensor in tensors_inside(leaf):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._arrive)
            if isinstance(leaf, Iterator):
                raise ValueError(
                    f"The wrapped module returns {type(leaf).__name__}, and the backward through tensors in it would "
                    f"begin unnoticed. Return {REGISTER}."
                )
        return output

    def _arrive(self, _gradient: Tensor) -> None:
        self._backwards.arrive()

    def _refuse_alone(self) -> None:
        if self.synchronizes and self._sync.has_replicas:
            raise ValueError(
                "torch.autograd.grad with respect to parameters under mk.ddp: gradients are averaged where backward() "
                "accumulates them, and these would be this rank's own. loss.backward() averages them; this rank's own "
                "can be taken within model.no_sync()"
            )

    def _begin(self) -> None:
        if torch.is_grad_enabled():
            raise ValueError(
                "backward(create_graph=True): gradients of a wrapped module's parameters are sent to other ranks, and "
                "have no graph. Second derivatives with respect to inputs work under mk.ddp: "
                "torch.autograd.grad(outputs, inputs, create_graph=True)"
            )
        self._op = self._record.begin(Kind.BACKWARD, "backward")
        self._sync.begin_backward()
        self._backward = self._sync.backward(last=self.synchronizes)
        self._backward.__enter__()

    def _end(self) -> None:
        assert self._backward is not None
        self._backward.__exit__(None, None, None)
        self._record.end(self._op)
        if self.synchronizes:
            self._sync.finish()


class _AveragedGradients(DDP):
    """Gradients averaged over replicas in each backward that synchronizes."""

    reduction = "mean"

    @property
    def has_replicas(self) -> bool:
        """Whether other ranks hold the module too."""
        return self._replicas.size > 1

    def begin_backward(self) -> None:
        """Expect the gradients of one backward, which autograd adds to those that are there."""
        for bucket in self._buckets:
            bucket.complete()  # of a backward that failed
            bucket.ready.clear()
        self._reducer.expect()

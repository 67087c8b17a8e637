"""The memory of an answer on a rank, tensor by tensor, beside a host's memory.

Ranks of a check are CPU processes. Here their memory is treated as device memory: every tensor that the answer makes
is counted while it lives, wherever it is kept. By category:

    params         the tensors that the exercise declares as parameters
    grads          the gradients of these, and those that an optimizer steps with
    optimizer      the states of every optimizer that steps
    buffers        tensors that existed before
    activations    everything else that the answer makes

The memory of a `Host` is not counted. As between a GPU and its host, no operator takes tensors from both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpkit.common.torch_private import TorchDispatchMode, tree_leaves
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


class Memory(TorchDispatchMode):
    """Counts all tensors that are made inside `with Memory(ctx, model.parameters()):`.

    Args:
        ctx: the rank's context, whose ledger counts the tensors.
        parameters: the tensors whose storages count as "params", and whose gradients count as "grads".
    """

    def __init__(self, ctx: Context, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ctx.record.ledger
        self._hosted: dict[int, weakref.ref[Any]] = {}
        self._handles: list[Any] = []
        self._parameters = list(parameters)

    def __enter__(self) -> Memory:
        """Start counting."""
        for parameter in self._parameters:
            self._ledger.track(parameter, "params")
            if parameter.requires_grad and parameter.is_leaf:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._count_gradient))
        self._handles += [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *how: Any) -> None:
        """Stop counting."""
        super().__exit__(*how)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator, and count the tensors that it takes and makes."""
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        hosted = [self.on_host(each) for each in given]
        if any(hosted) and "copy_" not in str(func) and "detach" not in str(func):
            for each, on_host in zip(given, hosted, strict=True):
                if not on_host and each.dim():
                    raise RuntimeError(
                        "Expected all tensors to be on the same device, but found at least two devices: device and host"
                    )
        for each, on_host in zip(given, hosted, strict=True):
            if not on_host:
                self._ledger.track(each, "buffers")
        made = func(*args, **(kwargs or {}))
        first = bool(hosted) and hosted[0]
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                if first:
                    self.keep_on_host(each)
                elif not self.on_host(each):
                    self._ledger.track(each, "activations")
        return made

    def on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the host's memory."""
        return bool(self._hosted) and tensor.untyped_storage()._cdata in self._hosted

    def keep_on_host(self, tensor: Tensor) -> None:
        """Record that a tensor is in the host's memory, so that it is not counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._hosted:
            self._hosted[key] = weakref.ref(storage, lambda _: self._hosted.pop(key, None))

    def _count_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._ledger.move(parameter.grad, "grads")

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.on_host(parameter.grad):
                    self._ledger.move(parameter.grad, "grads")

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for states in optimizer.state.values():
            for state in states.values():
                if isinstance(state, Tensor) and state.dim() and not self.on_host(state):
                    self._ledger.move(state, "optimizer")


class Host:
    """The host of a device: a second memory, and the bus between them. It is not counted; copies are recorded.

    Args:
        ctx: the rank's context.
        memory: the memory of the rank's device.
    """

    def __init__(self, ctx: Context, memory: Memory) -> None:
        self._record = ctx.record
        self._memory = memory

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor on the host."""
        return self._copy(tensor, Kind.COPY_TO_HOST)

    def get(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device of a tensor that is on the host."""
        return self._copy(tensor, Kind.COPY_TO_DEVICE)

    def _copy(self, tensor: Tensor, kind: Kind) -> Tensor:
        there, to_host = self._memory.on_host(tensor), kind == Kind.COPY_TO_HOST
        if there == to_host:
            where = "on the host" if there else "on the device"
            raise ValueError(f"host.{'put' if to_host else 'get'} of a tensor that is {where} already")
        op = self._record.begin(kind, nbytes=tensor.nbytes)
        copy = torch.from_numpy(tensor.detach().numpy().copy())
        if to_host:
            self._memory.keep_on_host(copy)
        else:
            self._record.ledger.track(copy, "activations")
        self._record.end(op)
        return copy

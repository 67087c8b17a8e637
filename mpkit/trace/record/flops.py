"""How much a stage computes and moves, counted once per shape, without computing anything.

The module runs forward and backward on fake tensors, which have shapes but no data. FLOPs are those of matrix
multiplications, convolutions and attention, counting a multiply-add as two (torch.utils.flop_counter), and of a causal
attention what is attended to; all other operators cost memory traffic instead. Bytes are what each operator reads and
writes, with one kernel per operator, as PyTorch runs them without compilation; views move nothing.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from mpkit.common.process_wide import LOCK
from mpkit.common.torch_private import FakeTensor, TorchDispatchMode, tree_leaves, tree_map_only
from mpkit.trace import Kind
from mpkit.trace.record.fake_mode import FakeMode
from mpkit.trace.record.operators import flops_of, moved_by, tensors_in

__all__ = ["Flops", "count", "total"]


@dataclass(frozen=True)
class Flops:
    """The cost of one forward and its backward; zeros for what could not be counted.

    Attributes:
        forward, backward: FLOPs.
        forward_bytes, backward_bytes: bytes read and written.
        layers: (forward, backward) FLOPs of every module inside, by name.
        why: why nothing could be counted; "" otherwise.
        input_grad, input_grad_bytes: the part of the backward for the gradients of the inputs; the rest is for those
            of the weights.
    """

    forward: float = 0.0
    backward: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    layers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    why: str = ""
    input_grad: float = 0.0
    input_grad_bytes: int = 0

    def cost_of(self, kind: Kind) -> tuple[float, int]:
        """Return the FLOPs and bytes of an op of this kind.

        >>> Flops(1.0, 2.0, 10, 20, input_grad=1.5).cost_of(Kind.WEIGHT_GRAD)
        (0.5, 20)
        """
        match kind:
            case Kind.BACKWARD:
                return self.backward, self.backward_bytes
            case Kind.INPUT_GRAD:
                return self.input_grad, self.input_grad_bytes
            case Kind.WEIGHT_GRAD:
                return self.backward - self.input_grad, self.backward_bytes - self.input_grad_bytes
            case _:
                return self.forward, self.forward_bytes


def count(target: Callable[..., Any], *inputs: Any) -> Flops:
    """Count the forward of a module or function on these inputs, and the backward of its outputs.

    Nothing is computed, and neither the module nor its gradients nor any random state change: a copy runs on
    tensors without data. A module that cannot run this way (because its control flow reads its tensors) costs
    zeros, and `why` says so; the function never raises.

    Args:
        target: a module, or a function of tensors such as a module with its loss.
        inputs: the arguments of `target`; an input that requires a gradient gets one in the backward.

    A linear layer with k inputs and n outputs takes 2bkn FLOPs forward, and as many for each of its two gradients:

    >>> flops = count(nn.Linear(3, 5), torch.zeros(2, 3, requires_grad=True))
    >>> flops.forward, flops.backward
    (60.0, 120.0)
    """
    try:
        with LOCK, _preserve_random_states(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself will show them
            return _count(target, inputs)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        return Flops(why=f"{type(error).__name__}: {reason}")


def total(parts: Sequence[Flops]) -> Flops:
    """Return the FLOPs and bytes of several computations together: unknown, so zeros, if those of one are unknown.

    >>> total([Flops(1.0, 2.0), Flops(10.0, 20.0)]).backward, total([Flops(1.0), Flops(why="...")]).forward
    (22.0, 0.0)
    """
    unknown = next((part for part in parts if part.why), None)
    return unknown or Flops(
        sum(part.forward for part in parts),
        sum(part.backward for part in parts),
        sum(part.forward_bytes for part in parts),
        sum(part.backward_bytes for part in parts),
        input_grad=sum(part.input_grad for part in parts),
        input_grad_bytes=sum(part.input_grad_bytes for part in parts),
    )


def _count(target: Callable[..., Any], inputs: tuple[Any, ...]) -> Flops:
    def fake(tensor: torch.Tensor) -> torch.Tensor:
        copied = _fake(tensor, mode)
        # The input of a module must not be a leaf: the counter cannot follow those through autograd.grad.
        return copied.view_as(copied) if tensor.requires_grad else copied

    mode = FakeMode()
    within = ModuleTracker()
    forward, backward, input_grad = (_Costs(mode, within) for _ in range(3))
    with mode, torch.enable_grad():
        target, inputs = _copy_module(target, mode), tree_map_only(torch.Tensor, fake, inputs)
        with within:  # from the forward on: its tensors show in which module the backward is
            with forward:
                outputs = [out for out in tree_leaves(target(*inputs)) if isinstance(out, torch.Tensor)]
            outputs = [out for out in outputs if out.requires_grad]
            ones = [torch.ones_like(out) for out in outputs]
            wanted = [x for x in tree_leaves(inputs) if _wants_gradient(x)]
            with backward:
                if outputs:
                    ends = [*_leaves_of(outputs), *wanted]
                    torch.autograd.grad(outputs, ends, ones, retain_graph=True, allow_unused=True)
        with input_grad:
            if outputs and wanted:
                torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
    layers = {
        name.partition(".")[2]: (forward.flops.get(name, 0.0), backward.flops.get(name, 0.0))
        for name in {**forward.flops, **backward.flops}
        if "." in name
    }
    return Flops(
        forward.flops.get("Global", 0.0),
        backward.flops.get("Global", 0.0),
        forward.nbytes,
        backward.nbytes,
        layers,
        input_grad=input_grad.flops.get("Global", 0.0),
        input_grad_bytes=input_grad.nbytes,
    )


def _fake(tensor: torch.Tensor, mode: Any) -> torch.Tensor:
    """Return a tensor without data; one on the meta device, which has no fused attention, as if on the CPU."""
    copied: torch.Tensor = mode.from_tensor(tensor.detach())
    if tensor.is_meta:
        copied = torch.empty_like(copied, device="cpu")
    return copied.requires_grad_(tensor.requires_grad)


def _copy_module(target: Callable[..., Any], mode: Any) -> Callable[..., Any]:
    """Copy a module, with parameters and buffers that hold no data; return a function as it is."""
    if not isinstance(target, nn.Module):
        return target
    memo: dict[int, Any] = {}
    for tensor in (*target.parameters(), *target.buffers()):
        faked = _fake(tensor, mode)
        memo[id(tensor)] = (
            nn.Parameter(faked, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else faked
        )
    return copy.deepcopy(target, memo)


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _leaves_of(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters in the outputs' graph, which is the only way to find those that a function uses."""
    seen: set[Any] = set()
    leaves: list[torch.Tensor] = []
    todo: list[Any] = [out.grad_fn for out in outputs]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):  # AccumulateGrad
                leaves.append(node.variable)
            todo += [following for following, _ in node.next_functions]
    return leaves


class _Costs(TorchDispatchMode):
    """A mode that sums the costs of operators without computing them.

    A function may use tensors of its own, with data, which must not be written to.

    Attributes:
        flops: FLOPs by module, each including those of the modules inside it; "Global": all of them.
        nbytes: bytes read and written.
    """

    def __init__(self, mode: Any, within: ModuleTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: dict[str, float] = {}
        self.nbytes = 0
        self._mode, self._within = mode, within

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # every second call: a query for a fake tensor's device
            return func(*args, **kwargs)
        if not all(isinstance(value, FakeTensor) for value in tensors_in((args, kwargs))):
            args, kwargs = tree_map_only(torch.Tensor, self._without_content, (args, kwargs))
        out = func(*args, **kwargs)
        self.nbytes += moved_by(func, args, kwargs, out)
        flops = flops_of(func, args, kwargs, out)
        if flops:
            for name in self._within.parents:
                self.flops[name] = self.flops.get(name, 0.0) + flops
        return out

    def _without_content(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, or a fake tensor in place of one that has data."""
        fake: torch.Tensor = tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)
        return fake


@contextmanager
def _preserve_random_states() -> Iterator[None]:
    """Restore every random state afterwards."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])

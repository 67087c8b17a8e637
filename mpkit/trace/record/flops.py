"""The FLOPs and bytes of a call, summed while it runs, on tensors with or without content.

FLOPs are those of matrix multiplications, convolutions and attention (of a causal one, only of attended pairs), with a
multiply-add as two (torch.utils.flop_counter); all other operators cost memory traffic instead. Bytes are those that
each operator reads and writes, with one kernel per operator, as PyTorch runs without compilation; views move nothing.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from mpkit.common.torch_private import TorchDispatchMode, tree_leaves, tree_map_only
from mpkit.trace import Kind
from mpkit.trace.record.fake_mode import FakeMode
from mpkit.trace.record.operators import flops_of, moved_by

Cost = tuple[float, int]
"""FLOPs and bytes."""


@dataclass(frozen=True)
class Flops:
    """The cost of one forward and its backward; zeros for what could not be counted."""

    forward: float = 0.0
    backward: float = 0.0
    forward_bytes: int = 0  # read and written
    backward_bytes: int = 0
    layers: Mapping[str, Cost] = field(default_factory=dict)  # forwards of modules inside, by name
    why: str = ""  # nothing could be counted
    input_grad: float = 0.0  # the part of the backward for the gradients of the inputs, not of the weights
    input_grad_bytes: int = 0
    attention: Cost = (0.0, 0)  # the part of the forward in attentions, which selective recomputation repeats

    def cost_of(self, kind: Kind) -> Cost:
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


def total(parts: Sequence[Flops]) -> Flops:
    """Return the FLOPs and bytes of several computations together: zeros (unknown) if those of one are unknown.

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
        attention=(sum(part.attention[0] for part in parts), sum(part.attention[1] for part in parts)),
    )


class Meter(TorchDispatchMode):
    """A mode that sums the cost of operators inside.

    >>> with Meter() as meter:
    ...     _ = nn.Linear(3, 5)(torch.zeros(2, 3))  # 2 b k n
    >>> meter.flops
    60.0
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.nbytes = 0.0, 0
        self.inside: list[str] = []  # the names of watched modules, and attentions, that run now
        self.within: dict[str, Cost] = {}  # the sums by these names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.add(func, args, kwargs, out)
        return out

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Add the cost of an operator that has run."""
        flops, nbytes = flops_of(func, args, kwargs, out), moved_by(func, args, kwargs, out)
        self.flops, self.nbytes = self.flops + flops, self.nbytes + nbytes
        for name in self.inside:
            before = self.within.get(name, (0.0, 0))
            self.within[name] = before[0] + flops, before[1] + nbytes

    def clear(self) -> None:
        """Begin anew."""
        self.flops, self.nbytes = 0.0, 0
        self.within.clear()

    def measured(self, module: str = "") -> Flops:
        """Return the sums as those of a module's forward, with names inside it relative to the module."""
        start = f"{module}." if module else ""
        others = dict(self.within)
        attention = others.pop(Attentions.NAME, (0.0, 0))
        inside = {name.removeprefix(start): cost for name, cost in others.items()}
        return Flops(self.flops, forward_bytes=self.nbytes, layers=inside, attention=attention)

    def watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        """Sum the cost of a module's forward by this name; return the hooks that do."""
        return [
            module.register_forward_pre_hook(lambda *_: self.inside.append(name)),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def _leave(self, *_: Any) -> None:
        self.inside.pop()


class Attentions(TorchFunctionMode):
    """A mode that lets a Meter sum the cost of `torch.nn.functional.scaled_dot_product_attention` by its name."""

    NAME = "scaled_dot_product_attention"

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self._meter.inside.append(self.NAME)
        try:
            output: Tensor = func(*args, **(kwargs or {}))
        finally:
            self._meter.inside.pop()
        return output


def count(target: Callable[..., Any], *inputs: Any) -> Flops:
    """Count the forward of a module or function on these inputs, and the backward of its outputs.

    Nothing is computed, and neither the module nor its gradients change: a copy runs on tensors without data. An input
    that requires a gradient gets one in the backward.

    A linear layer with k inputs and n outputs takes 2bkn FLOPs forward, and as many for each of its two gradients:

    >>> flops = count(nn.Linear(3, 5), torch.zeros(2, 3, requires_grad=True))
    >>> flops.forward, flops.backward
    (60.0, 120.0)
    """
    meter, mode = Meter(), FakeMode()
    with mode, torch.enable_grad():
        if isinstance(target, nn.Module):
            tensors = [*target.parameters(), *target.buffers()]
            target = copy.deepcopy(target, {id(each): _fake(each, mode) for each in tensors})
            for name, module in target.named_modules():
                meter.watch(name, module)
        leaves = tree_map_only(Tensor, partial(_fake, mode=mode), inputs)
        # The counter cannot follow leaves through autograd.grad.
        given = tree_map_only(Tensor, lambda leaf: leaf.view_as(leaf) if leaf.requires_grad else leaf, leaves)
        with Attentions(meter), meter:
            made = tree_leaves(target(*given))
        outputs = [each for each in made if isinstance(each, Tensor) and each.requires_grad]
        wanted = [each for each in tree_leaves(leaves) if isinstance(each, Tensor) and each.requires_grad]
        both, first = Meter(), Meter()
        for half, ends in ((both, leaves_of(outputs)), (first, wanted)):
            with half:
                if ends:
                    ones = [torch.ones_like(each) for each in outputs]
                    torch.autograd.grad(outputs, ends, ones, retain_graph=True, allow_unused=True)
    return replace(
        meter.measured(), backward=both.flops, backward_bytes=both.nbytes,
        input_grad=first.flops, input_grad_bytes=first.nbytes,
    )  # fmt: skip


def _fake(tensor: Tensor, mode: FakeMode) -> Tensor:
    """Return a tensor without data; a meta one as if on the CPU, since meta has no fused attention."""
    fake: Tensor = mode.from_tensor(tensor.detach())
    fake = torch.empty_like(fake, device="cpu") if tensor.is_meta else fake
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def leaves_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves of the outputs' graph, the only place to find the parameters that a function uses."""
    seen: set[Any] = set()
    leaves: list[Tensor] = []
    todo: list[Any] = [output.grad_fn for output in outputs]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):  # AccumulateGrad
                leaves.append(node.variable)
            todo += [following for following, _ in node.next_functions]
    return leaves

"""Recomputation block by block: a repeated block keeps its inputs, and computes the rest again in the backward.

    forward     the block without a graph; its inputs are kept, which are the outputs of the block before
    backward    the block again, with a graph, with the same dropout and the same buffers; then its gradients

So a stage holds the boundaries between its blocks, and of one block at a time what is within. Where a backward is in
two halves, I computes the block again and leaves its W to the stage's W.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", MLSys 2023, section 5: 2 s b h bytes a layer in 16 bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpkit.errors import MpkitError
from mpkit.models.blocks import repeated_blocks
from mpkit.parallel.anymodel.graph import Opened
from mpkit.parallel.split_backward import WeightGrads, input_grads
from mpkit.plan_checks import every
from mpkit.record.recorder import Recorder
from mpkit.record.saved import saving
from mpkit.trace import Kind

__all__ = ["Around", "RecomputedBlock", "chosen_blocks", "recompute_blocks"]

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""By these names transformers' models hand a block the keys and values of earlier tokens; training has none."""


def chosen_blocks(recompute: str, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The blocks that `Plan(recompute=...)` recomputes: all, or as in torchtitan every k-th.

    >>> blocks = {str(i): nn.Identity() for i in range(5)}
    >>> list(chosen_blocks("full", blocks)), list(chosen_blocks("every=2", blocks)), chosen_blocks("none", blocks)
    (['0', '1', '2', '3', '4'], ['1', '3'], {})
    """
    k = every(recompute)
    return {} if not k else {name: block for i, (name, block) in enumerate(blocks.items(), 1) if i % k == 0}


def recompute_blocks(model: nn.Module, recompute: str, opened: Opened | None) -> list[RecomputedBlock]:
    """Let the blocks that a plan chooses compute themselves again, from now on.

    A block that a pipeline cuts through (it is *opened*) does not: the pieces that it calls do.
    """
    chosen: dict[str, nn.Module] = {}
    for name, block in chosen_blocks(recompute, repeated_blocks(model)).items():
        if opened is not None and name in opened.modules:
            inside = [inner for inner in opened.blocks if inner.startswith(f"{name}.")]
            chosen |= {inner: model.get_submodule(inner) for inner in inside}
        else:
            chosen[name] = block
    return [RecomputedBlock(name, block) for name, block in chosen.items()]


@dataclass
class Around:
    """What the blocks of a stage have around them.

    Attributes:
        record: of the rank.
        modes: what a forward is entered in.
        costs: of a block, by name: FLOPs and bytes of its forward.
        weight_grads: where I leaves what W has to do; None where a backward is whole.
    """

    record: Recorder
    modes: Callable[[], AbstractContextManager[Any]] = nullcontext
    costs: Callable[[str], tuple[float, int]] = lambda _: (0.0, 0)
    weight_grads: list[WeightGrads] | None = None


class RecomputedBlock:
    """A block of the model that computes itself again, from now on.

    Attributes:
        around: of its stage; None: nobody trains, and the block computes as ever.
    """

    def __init__(self, name: str, block: nn.Module) -> None:
        self.name, self.block = name, block
        self.around: Around | None = None
        self._is_kept: bool | None = None  # since it writes into its inputs; None: not known yet
        self._checked: set[Any] = set()  # shapes of which a second forward gave what the first did
        block.forward = self._wrap(block.forward)  # within its hooks: those run once

    def _wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(inner).parameters)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.around is None or not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            named = zip_longest(names[: len(args)], args)
            args = tuple(None if name in CACHES else arg for name, arg in named)
            kwargs |= {key: None for key in CACHES if key in kwargs}
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
            return self._call(inner, args, kwargs)

        return forward

    def _call(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, shape = tree_flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[i] for i in where]
        trains = any(parameter.requires_grad for parameter in self.block.parameters())
        if not trains and not any(tensor.requires_grad for tensor in tensors):
            return inner(*args, **kwargs)

        def compute(given: list[Tensor]) -> tuple[list[Any], Any]:
            for i, tensor in zip(where, given, strict=True):
                leaves[i] = tensor
            again_args, again_kwargs = tree_unflatten(leaves, shape)
            for i in where:
                leaves[i] = None
            return tree_flatten(inner(*again_args, **again_kwargs))

        if self._is_kept is None:
            self._is_kept = self._writes(compute, tensors)
        if self._is_kept:
            return inner(*args, **kwargs)
        # Something that requires a gradient, so that the block has a backward though its inputs want none.
        anchor = torch.zeros((), requires_grad=not any(tensor.requires_grad for tensor in tensors))
        call = _Call(self, compute, _Setting.now(tensors))
        found = _Recomputed.apply(call, anchor, *tensors)  # type: ignore[no-untyped-call]
        made = iter(found if isinstance(found, tuple) else (found,))
        outputs = [
            tensors[leaf.place] if isinstance(leaf, _Given) else next(made) if leaf is _MADE else leaf
            for leaf in call.outputs
        ]
        return tree_unflatten(outputs, call.shape)

    def _writes(self, compute: Callable[[list[Tensor]], Any], tensors: list[Tensor]) -> bool:
        """Whether the block writes into what it is given, tried on copies if it works in place anywhere."""
        if not any(getattr(module, "inplace", False) for module in self.block.modules()):
            return False
        copies = [tensor.detach().clone() for tensor in tensors]
        versions = [copy._version for copy in copies]
        with torch.no_grad(), _Setting.now(tensors).again(), self.spare_buffers():
            compute(copies)
        return [copy._version for copy in copies] != versions

    @contextmanager
    def spare_buffers(self) -> Iterator[None]:
        """Inside, the block works on copies of its buffers: running means are not updated a second time."""
        kept = [
            (module, name, buffer)
            for module in self.block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        for module, name, buffer in kept:
            module._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for module, name, buffer in kept:
                module._buffers[name] = buffer

    def check(self, key: Any, before: list[tuple[Tensor, int]], after: list[Tensor]) -> None:
        """Check, once per shape, that the second forward gives what the first did.

        What a layer behind the block has overwritten (a ReLU that works in place) cannot be compared any more.
        """
        self._checked.add(key)
        same = len(before) == len(after) and all(
            one.shape == other.shape
            and (one._version != version or torch.allclose(one, other, rtol=1e-2, atol=1e-5, equal_nan=True))
            for (one, version), other in zip(before, after, strict=True)
        )
        if not same:
            raise MpkitError(
                f"{self.name} ({type(self.block).__name__}) computed something else when its forward was done again "
                "for its backward: it keeps something from call to call, such as a cache, a counter or random numbers "
                "that are not torch's. Keep all activations, Plan(recompute='none'), or only attentions, "
                "Plan(recompute='selective')"
            )


@dataclass
class _Setting:
    """What a forward depends on besides its inputs: random states, and automatic casts."""

    random: Tensor
    random_there: Tensor | None
    device: torch.device
    cast: tuple[bool, torch.dtype]

    @classmethod
    def now(cls, tensors: list[Tensor]) -> _Setting:
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kind = device.type
        cast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(torch.get_rng_state(), there, device, cast)

    @contextmanager
    def again(self) -> Iterator[None]:
        before, there = torch.get_rng_state(), self.random_there
        before_there = torch.cuda.get_rng_state(self.device) if there is not None else None
        torch.set_rng_state(self.random)
        if there is not None:
            torch.cuda.set_rng_state(there, self.device)
        try:
            with torch.autocast(self.device.type, self.cast[1], self.cast[0]):
                yield
        finally:
            torch.set_rng_state(before)
            if before_there is not None:
                torch.cuda.set_rng_state(before_there, self.device)


_MADE = object()
"""In the place of a tensor that a block made."""


@dataclass(frozen=True)
class _Given:
    """In the place of a tensor that a block was given and hands on."""

    place: int


class _Call:
    """One call of a block, from its forward to its backward."""

    def __init__(
        self,
        block: RecomputedBlock,
        compute: Callable[[list[Tensor]], tuple[list[Any], Any]],
        setting: _Setting,
    ) -> None:
        assert block.around is not None
        self.block, self.around, self.compute, self.setting = block, block.around, compute, setting
        self.place = block.around.record.place()[:2]
        self.outputs: list[Any] = []
        self.shape: Any = None
        self.first: list[
            tuple[Tensor, int]
        ] = []  # what the forward made, and versions, until it was compared
        self.gradients: tuple[Any, ...] | None = None  # found in I, and asked for again in W

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that the block makes."""
        versions = [tensor._version for tensor in tensors]
        leaves, self.shape = self.compute(tensors)
        if [tensor._version for tensor in tensors] != versions:
            raise MpkitError(
                f"{self.block.name} ({type(self.block.block).__name__}) writes into its input, which recompute= needs "
                "for the second forward. Write x = x + y for x += y, and inplace=False; or Plan(recompute='selective')"
            )
        given = {id(tensor): i for i, tensor in enumerate(tensors)}
        self.outputs = [
            leaf if not isinstance(leaf, Tensor) else _Given(given[id(leaf)]) if id(leaf) in given else _MADE
            for leaf in leaves
        ]
        made = self._made(leaves)
        if self._key not in self.block._checked and not any(
            isinstance(tensor, FakeTensor) for tensor in made
        ):
            self.first = [(tensor.detach(), tensor._version) for tensor in made]
        for tensor in made:
            self.around.record.ledger.track(tensor, "activations")
        return tuple(made)

    @property
    def _key(self) -> Any:
        return str(self.shape), len(self.outputs)

    def _made(self, leaves: list[Any]) -> list[Tensor]:
        return [leaf for leaf, what in zip(leaves, self.outputs, strict=True) if what is _MADE]

    def backward(self, tensors: list[Tensor], gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """The gradients of the inputs; those of the weights are added to theirs, or left for W."""
        around, record = self.around, self.around.record
        stage, m = self.place
        flops, nbytes = around.costs(self.block.name)
        op = record.begin(
            Kind.RECOMPUTE, self.block.name, stage=stage, microbatch=m, flops=flops, nbytes=nbytes
        )
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with (
            torch.enable_grad(),
            self.setting.again(),
            around.modes(),
            self.block.spare_buffers(),
            saving(record, stage, ("block", self.block.name), every=True) as saved,
        ):
            made = self._made(self.compute(inputs)[0])
        record.end(op)
        if self.first:
            self.block.check(self._key, self.first, [tensor.detach() for tensor in made])
            self.first = []
        pairs = [(t, g) for t, g in zip(made, gradients, strict=True) if g is not None and t.requires_grad]
        outputs, wanted = [t for t, _ in pairs], [x for x in inputs if x.requires_grad]
        if around.weight_grads is None:
            if outputs:
                torch.autograd.backward(outputs, [g for _, g in pairs])
            found = iter([x.grad for x in wanted])
            saved.release()
        else:
            of_inputs, later = input_grads(outputs, [g for _, g in pairs], wanted)
            found = iter(of_inputs)
            del made, outputs, pairs
            for tensor in later.held():
                record.ledger.track(tensor, "activations")
            around.weight_grads.append(later)
        return [next(found) if x.requires_grad else None for x in inputs]


class _Recomputed(torch.autograd.Function):
    """A call of a block that keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, _anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        made = call.forward(list(tensors))
        ctx.mark_non_differentiable(*(t for t in made if not t.is_floating_point() and not t.is_complex()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        call: _Call = ctx.call
        if call.gradients is None:
            found = tuple(call.backward(list(ctx.saved_tensors), gradients))
            if call.around.weight_grads is None:
                return None, None, *found
            call.gradients = found
        return None, None, *call.gradients

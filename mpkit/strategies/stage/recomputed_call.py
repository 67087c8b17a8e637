"""One call of a recomputed block: its forward without a graph, and again when its gradient has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpkit.common.torch_private import FakeTensor
from mpkit.errors import MpkitError
from mpkit.strategies.models.own_draws import KeptSpans, OwnDraws
from mpkit.strategies.models.randomness import OtherState
from mpkit.strategies.stage.second_forward import StartingPoint
from mpkit.strategies.stage.split_backward import WeightGrads, input_grads
from mpkit.trace import Kind
from mpkit.trace.record.recorder import Recorder

if TYPE_CHECKING:
    from mpkit.strategies.stage.block_recompute import RecomputedBlock

__all__ = ["MADE", "BlockCall", "ForwardContext", "PassedThrough", "RecomputeScope", "RecomputedCall"]


@dataclass
class RecomputeScope:
    """The context in which a stage's blocks are recomputed.

    Attributes:
        record: the rank's recorder.
        modes: context managers in which a forward runs.
        costs: FLOPs and bytes of a block's forward, by its name.
        weight_grads: where I leaves the work for W; None where a backward is not split.
        draws: the rank's random numbers.
    """

    record: Recorder
    modes: Callable[[], AbstractContextManager[Any]] = nullcontext
    costs: Callable[[str], tuple[float, int]] = lambda _: (0.0, 0)
    weight_grads: list[WeightGrads] | None = None
    draws: OwnDraws = field(default_factory=OwnDraws)


@dataclass
class ForwardContext:
    """What a forward depends on besides its inputs: random states and autocast."""

    random: Tensor
    random_there: Tensor | None
    device: torch.device
    cast: tuple[bool, torch.dtype]
    draws: OwnDraws
    spans: KeptSpans
    others: OtherState | None

    @classmethod
    def now(cls, tensors: list[Tensor], draws: OwnDraws, *, others: bool) -> ForwardContext:
        """Return the current setting; `others`: with the states of generators that are not torch's."""
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kind = device.type
        cast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        other = OtherState.now() if others else None
        return cls(torch.get_rng_state(), there, device, cast, draws, draws.keep(), other)

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Restore the setting inside the block."""
        before, there = torch.get_rng_state(), self.random_there
        before_there = torch.cuda.get_rng_state(self.device) if there is not None else None
        others = OtherState.now() if self.others is not None else None
        if self.others is not None:
            self.others.restore()
        torch.set_rng_state(self.random)
        if there is not None:
            torch.cuda.set_rng_state(there, self.device)
        try:
            with (
                torch.autocast(self.device.type, self.cast[1], self.cast[0]),
                self.draws.reenter_spans(self.spans),
            ):
                yield
        finally:
            torch.set_rng_state(before)
            if others is not None:
                others.restore()
            if before_there is not None:
                torch.cuda.set_rng_state(before_there, self.device)


MADE = object()
"""Marks the place of a tensor that a block made."""


@dataclass(frozen=True)
class PassedThrough:
    """Marks the place of a tensor that a block was given and passes on."""

    place: int


class BlockCall:
    """One call of a block, from its forward to its backward."""

    def __init__(
        self,
        block: RecomputedBlock,
        compute: Callable[[list[Tensor]], tuple[list[Any], Any]],
        setting: ForwardContext,
    ) -> None:
        assert block.around is not None
        self.block, self.around, self.compute, self.setting = block, block.around, compute, setting
        self.place = block.around.record.place()[:2]
        self.outputs: list[Any] = []
        self.shape: Any = None
        self.start: StartingPoint | None = None
        self.first: list[
            tuple[Tensor, int]
        ] = []  # outputs of the forward with their versions, until they are compared
        self.gradients: tuple[Any, ...] | None = None  # computed in I, and returned again in W

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors that the block makes."""
        versions = [tensor._version for tensor in tensors]
        with self.block.twice.first() as self.start:
            leaves, self.shape = self.compute(tensors)
        if [tensor._version for tensor in tensors] != versions:
            raise MpkitError(
                f"{self.block.name} ({type(self.block.block).__name__}) writes into its input, which recompute= needs "
                "for the second forward. Write x = x + y for x += y, and inplace=False; or Plan(recompute='selective')"
            )
        given = {id(tensor): i for i, tensor in enumerate(tensors)}
        self.outputs = [
            leaf
            if not isinstance(leaf, Tensor)
            else PassedThrough(given[id(leaf)])
            if id(leaf) in given
            else MADE
            for leaf in leaves
        ]
        # Aliases, since autograd makes what a Function returns its output: a constant that the block hands on (a global
        # table, its own buffer) would lead into this call from then on, and the backward of the next one back here.
        made = [tensor.detach() for tensor in self._select_made(leaves)]
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

    def _select_made(self, leaves: list[Any]) -> list[Tensor]:
        return [leaf for leaf, what in zip(leaves, self.outputs, strict=True) if what is MADE]

    def backward(self, tensors: list[Tensor], gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Return the gradients of the inputs; those of the weights are added to their `.grad`, or left for W."""
        around, record = self.around, self.around.record
        stage, m = self.place
        flops, nbytes = around.costs(self.block.name)
        op = record.begin(
            Kind.RECOMPUTE, self.block.name, stage=stage, microbatch=m, flops=flops, nbytes=nbytes
        )
        assert self.start is not None
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with (
            torch.enable_grad(),
            self.setting.restore(),
            around.modes(),
            self.start.begin_again(),
            record.memory.saving(),
        ):
            made = self._select_made(self.compute(inputs)[0])
        record.end(op)
        if self.first:
            self.block.check(self._key, self.first, [tensor.detach() for tensor in made])
            self.first = []
        pairs = [(t, g) for t, g in zip(made, gradients, strict=True) if g is not None and t.requires_grad]
        outputs, wanted = [t for t, _ in pairs], [x for x in inputs if x.requires_grad]
        if around.weight_grads is None:
            if outputs:
                torch.autograd.backward(outputs, [g for _, g in pairs])
            grads = iter([x.grad for x in wanted])
        else:
            of_inputs, later = input_grads(outputs, [g for _, g in pairs], wanted)
            grads = iter(of_inputs)
            del made, outputs, pairs
            for tensor in later.held_gradients():
                record.ledger.track(tensor, "activations")
            around.weight_grads.append(later)
        return [next(grads) if x.requires_grad else None for x in inputs]


class RecomputedCall(torch.autograd.Function):
    """A call of a block that keeps only its inputs."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, _anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the block without a graph."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        made = call.forward(list(tensors))
        ctx.mark_non_differentiable(*(t for t in made if not t.is_floating_point() and not t.is_complex()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Recompute the block with a graph, and run its backward."""
        call: BlockCall = ctx.call
        if call.gradients is None:
            grads = tuple(call.backward(list(ctx.saved_tensors), gradients))
            if call.around.weight_grads is None:
                return None, None, *grads
            call.gradients = grads
        return None, None, *call.gradients

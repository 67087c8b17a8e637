"""TrainJob: what a rank needs to know to do its part of a training. Made by `mpkit.prepare`, all of it data."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mpkit.data_batches import Batches
from mpkit.models.hooks import Hook
from mpkit.parallel.checkpoint_files import Resume, Saving
from mpkit.parallel.feed import WholeBatches
from mpkit.plan import Plan
from mpkit.record.flops import Flops

if TYPE_CHECKING:
    from mpkit.data_stream import Stream
    from mpkit.parallel.anymodel.graph import Opened
    from mpkit.parallel.fed import FedBatches

__all__ = ["Boundary", "LayerNumbers", "LocalNumbers", "Route", "Shared", "Spec", "TrainJob"]


class Spec(NamedTuple):
    """A tensor that crosses from a layer to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Boundary:
    """What crosses from a layer to the next: a tensor, or a tuple of tensors.

    Attributes:
        specs: one a tensor.
        single: a tensor itself, not a tuple of one.
    """

    specs: tuple[Spec, ...]
    single: bool = True

    @classmethod
    def of(cls, value: Any) -> Boundary | None:
        """The boundary that a layer's output is; None if it is neither a tensor nor a tuple of tensors."""
        tensors = (value,) if isinstance(value, Tensor) else value
        if not isinstance(tensors, tuple) or not all(isinstance(t, Tensor) for t in tensors) or not tensors:
            return None
        specs = tuple(Spec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        return cls(specs, isinstance(value, Tensor))

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor."""
        return [(spec.shape, spec.dtype) for spec in self.specs]

    def pack(self, tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """The value that a layer is called with."""
        return tensors[0] if self.single else tensors

    def __str__(self) -> str:
        shapes = [f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}" for spec in self.specs]
        return shapes[0] if self.single else f"({', '.join(shapes)})"


class Route(NamedTuple):
    """What goes from one stage to a later one for a micro-batch; gradients come back along it.

    Attributes:
        source, target: the stages.
        which: of the source's outputs, by number.
        specs: one a tensor.
    """

    source: int
    target: int
    which: tuple[int, ...]
    specs: tuple[Spec, ...]


@dataclass(frozen=True)
class Shared:
    """A weight that several stages compute with, and so train together.

    Attributes:
        names: by stage, in order, what it is called there.
    """

    names: dict[int, str]


@dataclass(frozen=True)
class LayerNumbers:
    """What a layer does to one micro-batch.

    Attributes:
        flops: and bytes, of forward and backward.
        output: what it passes on; None if it is nothing that can be sent.
        in_place: it writes into what it is given.
    """

    flops: Flops
    output: Boundary | None
    in_place: bool = False


class LocalNumbers(NamedTuple):
    """What a rank makes of a micro-batch.

    Attributes:
        numbers: by signature of a micro-batch, what each layer does to it, and last the loss.
        opened: how a model that is no chain is divided among the stages; None of a chain.
    """

    numbers: dict[Hashable, list[LayerNumbers]]
    opened: Opened | None


@dataclass
class TrainJob:
    """A training, ready to start.

    Attributes:
        plan: how.
        model: on the CPU; a rank takes its own layers out and lets go of the rest.
        stages: the layers of each stage, by number.
        batches: what each step takes; on the CPU.
        loss: loss(outputs, targets) -> scalar, the mean over the batch, or (total, count).
        optimizer: optimizer(params) -> torch.optim.Optimizer, of all parameters that are trained.
        steps: how many.
        seed: of the ranks' random state.
        local: by place along tp, what a rank there makes of a micro-batch; one, if all are alike.
        names: of the model's state dict, in order.
        meta: about the run, of JSON types; goes into the trace.
        max_grad_norm: gradients are clipped to this norm, all together; None: they are not.
        lr_schedule: what the learning rate is multiplied by in step i; None: 1.
        saving: when and where checkpoints are saved; None: never.
        resume: the checkpoint that is gone on from.
        facts: of model and optimizer, which a checkpoint has to share.
        shared: the tied weights that several stages compute with.
        parameter_hooks: on the model's parameters, by their first names; pickling drops those.
        place: this rank's along tp.
        nominal: about the count of a batch, for a loss that returns (total, count) (`mpkit.loss.quotient`); None for
            a mean over samples.
    """

    plan: Plan
    model: nn.Module | None
    stages: list[range]
    batches: WholeBatches | Batches | Stream | FedBatches
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int
    seed: int
    local: list[LocalNumbers]
    names: list[str]
    meta: dict[str, Any] = field(default_factory=dict)
    max_grad_norm: float | None = None
    lr_schedule: Callable[[int], float] | None = None
    saving: Saving | None = None
    resume: Resume | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    shared: list[Shared] = field(default_factory=list)
    parameter_hooks: list[Hook] = field(default_factory=list)
    place: int = 0
    nominal: float | None = None

    @property
    def numbers(self) -> dict[Hashable, list[LayerNumbers]]:
        """By signature of a micro-batch, what each layer does to it on this rank, and last the loss."""
        return self.local[self.place % len(self.local)].numbers

    @property
    def opened(self) -> Opened | None:
        """How a model that is no chain is divided among the stages; None of a chain."""
        return self.local[self.place % len(self.local)].opened

    @property
    def first_step(self) -> int:
        """The number of the first step: 0, or where the checkpoint ends."""
        return 0 if self.resume is None else self.resume.head.step

    def boundary(self, key: Hashable, stage: int) -> Boundary:
        """What crosses from a stage to the next, for micro-batches of this signature."""
        output = self.numbers[key][self.stages[stage].stop - 1].output
        assert output is not None, "a cut is only made where something can be sent"
        return output

    def arriving(self, key: Hashable, stage: int) -> list[Route]:
        """The routes that end at a stage, for micro-batches of this signature: in a chain, from the stage before."""
        if self.opened is not None:
            return [route for route in self.opened.divisions[key].routes if route.target == stage]
        return [] if stage == 0 else self.leaving(key, stage - 1)

    def leaving(self, key: Hashable, stage: int) -> list[Route]:
        """The routes that begin at a stage, likewise."""
        if self.opened is not None:
            return [route for route in self.opened.divisions[key].routes if route.source == stage]
        if stage == len(self.stages) - 1:
            return []
        specs = self.boundary(key, stage).specs
        return [Route(stage, stage + 1, tuple(range(len(specs))), specs)]

    def block_cost(self, key: Hashable, stage: int, names: list[str], block: str) -> tuple[float, int]:
        """FLOPs and bytes of a block's forward, as far as they were counted, for micro-batches of this signature.

        Args:
            stage, names: whose block it is, and the names of the stage's layers.
            block: its name.
        """
        if self.opened is not None:
            nodes = self.opened.divisions[key].graph.nodes
            found = [node.flops for node in nodes if node.block and f"{node.name}.".startswith(f"{block}.")]
            return sum(flops.forward for flops in found), sum(flops.forward_bytes for flops in found)
        for name, i in zip(names, self.stages[stage], strict=True):
            flops = self.numbers[key][i].flops
            if name == block:
                return flops.forward, flops.forward_bytes
            if not name or block.startswith(f"{name}."):
                return flops.layers.get(block.removeprefix(f"{name}.") if name else block, (0.0, 0.0))[0], 0
        return 0.0, 0

    def flops(self, key: Hashable, stage: int) -> Flops:
        """FLOPs and bytes of a stage, the last with the loss, for micro-batches of this signature."""
        if self.opened is not None:
            return self.opened.divisions[key].flops(stage)
        numbers = self.numbers[key]
        held = [numbers[layer].flops for layer in self.stages[stage]]
        if stage == len(self.stages) - 1:
            held.append(numbers[-1].flops)
        return Flops(
            sum(flops.forward for flops in held),
            sum(flops.backward for flops in held),
            sum(flops.forward_bytes for flops in held),
            sum(flops.backward_bytes for flops in held),
            input_grad=sum(flops.input_grad for flops in held),
            input_grad_bytes=sum(flops.input_grad_bytes for flops in held),
        )

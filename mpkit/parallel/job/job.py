"""TrainJob: all that a rank needs to know to do its part of a training, as data that `mpkit.prepare.prepare` makes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mpkit.data.batches import Batches
from mpkit.models.hooks import Hook
from mpkit.parallel.checkpoint.files import Resume, Saving
from mpkit.parallel.job.feed import WholeBatches
from mpkit.parallel.partition.boundary import Boundary, LayerNumbers, Route, Shared
from mpkit.plan.plan import Plan
from mpkit.record.flops import Flops

if TYPE_CHECKING:
    from mpkit.data.fed import FedBatches
    from mpkit.data.stream import Stream
    from mpkit.parallel.partition.graph import PartitionedModel

__all__ = ["LocalNumbers", "TrainJob"]


class LocalNumbers(NamedTuple):
    """What one rank makes of a micro-batch.

    Attributes:
        numbers: what each layer does to a micro-batch, and last the loss, by the micro-batch's signature.
        opened: how a model that is not a chain is divided among the stages; None for a chain.
    """

    numbers: dict[Hashable, list[LayerNumbers]]
    opened: PartitionedModel | None


@dataclass
class TrainJob:
    """A training, ready to start.

    Attributes:
        plan: the plan by which to train.
        model: on the CPU; a rank takes its own layers out and drops the rest.
        stages: the layers of each stage, by number.
        batches: what each step takes, on the CPU.
        loss: loss(outputs, targets) -> scalar, the mean over the batch, or (total, count).
        optimizer: optimizer(params) -> torch.optim.Optimizer, for all trained parameters.
        steps: number of steps.
        seed: seed of the ranks' random states.
        local: what a rank makes of a micro-batch, by its place along tp; only one entry if all are equal.
        names: names of the model's state dict, in order.
        meta: information about the run, of JSON types, for the trace.
        max_grad_norm: maximum global norm, to which gradients are clipped; None if they are not.
        lr_schedule: factor of the learning rate in step i; None for a factor of 1.
        saving: when and where checkpoints are saved; None: never.
        resume: the checkpoint from which training resumes; None for a new training.
        facts: facts about model and optimizer that a checkpoint has to share.
        shared: the tied weights that several stages compute with.
        parameter_hooks: hooks on the model's parameters, by their first names; pickling drops those.
        place: this rank's place along tp.
        nominal: approximate count of a batch, for a loss that returns (total, count) (`mpkit.loss.quotient`); None for
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
        """What each layer does to a micro-batch on this rank, and last the loss, by the micro-batch's signature."""
        return self.local[self.place % len(self.local)].numbers

    @property
    def opened(self) -> PartitionedModel | None:
        """How a model that is not a chain is divided among the stages; None for a chain."""
        return self.local[self.place % len(self.local)].opened

    @property
    def first_step(self) -> int:
        """The number of the first step: 0, or where the checkpoint ends."""
        return 0 if self.resume is None else self.resume.head.step

    def boundary(self, key: Hashable, stage: int) -> Boundary:
        """Return what crosses from a stage to the next, for micro-batches of this signature."""
        output = self.numbers[key][self.stages[stage].stop - 1].output
        assert output is not None, "a cut is only made where something can be sent"
        return output

    def arriving(self, key: Hashable, stage: int) -> list[Route]:
        """Return the routes that end at a stage for this signature; in a chain, from the stage before."""
        if self.opened is not None:
            return [route for route in self.opened.divisions[key].routes if route.target == stage]
        return [] if stage == 0 else self.leaving(key, stage - 1)

    def leaving(self, key: Hashable, stage: int) -> list[Route]:
        """Return the routes that begin at a stage, for micro-batches of this signature."""
        if self.opened is not None:
            return [route for route in self.opened.divisions[key].routes if route.source == stage]
        if stage == len(self.stages) - 1:
            return []
        specs = self.boundary(key, stage).specs
        return [Route(stage, stage + 1, tuple(range(len(specs))), specs)]

    def block_cost(self, key: Hashable, stage: int, names: list[str], block: str) -> tuple[float, int]:
        """Return FLOPs and bytes of a block's forward for this signature, as far as they were counted.

        Args:
            stage, names: the block's stage, and the names of the stage's layers.
            block: the block's name.
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
        """Return FLOPs and bytes of a stage, the last with the loss, for micro-batches of this signature."""
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

"""Faults planted in the strategies, on the ranks alone: a loss that travels to them plants one where it arrives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mpkit.strategies.compute.stage_forward import StageForward
from mpkit.strategies.job.feed import Feed
from mpkit.strategies.replicas.ddp import DDP
from mpkit.strategies.replicas.tied import TiedWeights
from mpkit.strategies.replicas.zero import Zero
from mpkit.strategies.runtime.pipeline import Pipeline
from mpkit.strategies.runtime.train import Training
from mpkit.strategies.stage.gradient_sync import GradientSync
from mpkit.strategies.stage.partitioned_stage import PartitionedStage
from mpkit.strategies.update.update import Update


class Planted:
    """A loss that plants a fault on each rank that unpickles it, and nowhere else."""

    def __init__(self, loss: Callable[[Any, Any], Any], fault: str) -> None:
        self.loss, self.fault = loss, fault

    def __call__(self, outputs: Any, targets: Any) -> Any:
        return self.loss(outputs, targets)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if dist.is_initialized():
            FAULTS[self.fault](dist.get_rank())


def after(owner: type, name: str, then: Callable[..., Any]) -> None:
    """Do something after a method."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        then(self, *args, **kwargs)
        return made

    setattr(owner, name, method)


def syncs() -> list[type]:
    """The classes of synchronization that have a `finish` of their own."""
    found, todo = [], [GradientSync]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        found += [kind] if "finish" in vars(kind) else []
    return found


def scaled(factor: float, *, last: bool = False) -> Callable[[int], None]:
    def plant(rank: int) -> None:
        def scale(sync: Any) -> None:
            for piece in sync.pieces[-1:] if last else sync.pieces:
                if piece.held.grad is not None:
                    piece.held.grad.mul_(factor)

        for kind in syncs():
            after(kind, "finish", scale)

    return plant


def on(chosen: int, plant: Callable[[int], None]) -> Callable[[int], None]:
    return lambda rank: plant(rank) if rank == chosen else None


def element(rank: int) -> None:
    """One element of one gradient is a thousandth off."""

    def change(sync: Any) -> None:
        for piece in sync.pieces[:1]:
            if piece.held.grad is not None and piece.held.numel():
                flat = piece.held.grad.view(-1)
                flat[flat.abs().argmax()] *= 1.001

    for kind in syncs():
        after(kind, "finish", change)


def mode(rank: int) -> None:
    """Evaluation mode, also of what a partitioned model calls between its blocks."""

    def evaluate(self: Any, *_: Any) -> None:
        for stage in self.sync.stages.values():
            stage.layers.eval()
            if isinstance(stage, PartitionedStage):
                stage._skeleton.model.eval()

    after(Training, "__init__", evaluate)


def reordered(rank: int) -> None:
    """Targets of another micro-batch, or of another sample."""
    original = Feed.take

    def take(self: Any, step: int) -> Any:
        made = original(self, step)
        targets = [each.targets for each in made]
        for each, other in zip(made, targets[1:] + targets[:1], strict=True):
            each.targets = other
        for each in made if len(made) == 1 else ():
            each.targets = each.targets.flip(0) if isinstance(each.targets, torch.Tensor) else each.targets
        return made

    Feed.take = take  # type: ignore[method-assign]


def lost_buffers(rank: int) -> None:
    """Buffers are as they were before the step."""

    def reset(self: Any, number: int) -> None:
        for stage in self.sync.stages.values():
            for buffer in stage.layers.buffers():
                buffer.zero_()

    after(Training, "step", reset)
    # The evidence is written within the step, so the buffers are lost before it.
    original = Update.step

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for stage in self._sync.stages.values():
            for buffer in stage.layers.buffers():
                buffer.zero_()

    Update.step = step  # type: ignore[method-assign]


def shared_draws(rank: int) -> None:
    """All replicas and micro-batches draw the same numbers."""
    original = StageForward.draws

    def draws(self: Any, m: int, inputs: Any) -> Any:
        made = original(self, m, inputs)
        object.__setattr__(made, "place", (*made.place[:2], 0, 0))
        return made

    StageForward.draws = draws  # type: ignore[method-assign]


def stale(rank: int) -> None:
    """The model's parameters are not brought up to date with what was updated."""
    for kind in [GradientSync, *syncs(), Zero]:
        if "renew" in vars(kind):
            kind.renew = lambda self: None  # type: ignore[attr-defined]
    if rank:
        after(Update, "step", lambda self, *_: [
            parameter.data.add_(1e-3)
            for parameter in (piece.parameter for piece in self._sync.pieces)
            if type(parameter) is torch.nn.Parameter
        ])  # fmt: skip


def no_update(rank: int) -> None:
    """The second step is not made."""
    original = Update.step

    def step(self: Any, number: int, *args: Any) -> None:
        optimizer, self.optimizer = self.optimizer, None if number == 1 else self.optimizer
        original(self, number, *args)
        self.optimizer = optimizer

    Update.step = step  # type: ignore[method-assign]


def late_rate(rank: int) -> None:
    """The learning rate of the step before."""
    original = Update.step
    Update.step = lambda self, number, *args: original(self, max(0, number - 1), *args)  # type: ignore[method-assign]


def own_norm(rank: int) -> None:
    """Gradients are clipped to twice the limit."""
    original = Update._clip
    Update._clip = lambda self, gradients, limit: original(self, gradients, 2 * limit)  # type: ignore[method-assign]


def no_decay(rank: int) -> None:
    """Groups have no weight decay."""

    def change(self: Any, *_: Any) -> None:
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["weight_decay"] = 0.0

    after(Update, "__init__", change)


def other_loss(rank: int) -> None:
    """The loss that is reported is a thousandth off."""
    original = Training._loss_and_factor

    def counted(self: Any, returned: Any) -> Any:
        loss, factor = original(self, returned)
        return None if loss is None else loss * 1.001, factor

    Training._loss_and_factor = counted  # type: ignore[method-assign]


def not_reduced(rank: int) -> None:
    """Gradients are not summed over the replicas."""
    original = DDP.finish

    def finish(self: Any) -> None:
        before = [None if p.held.grad is None else p.held.grad.clone() for p in self.pieces]
        original(self)
        for piece, grad in zip(self.pieces, before, strict=True):
            if grad is not None and piece.held.grad is not None:
                piece.held.grad.copy_(grad / 2)

    DDP.finish = finish  # type: ignore[method-assign]


def not_tied(rank: int) -> None:
    """Gradients of tied weights are not summed over their stages."""
    TiedWeights.sum_gradients = lambda self: None  # type: ignore[method-assign]


def initial(rank: int) -> None:
    """The ranks begin with other weights."""

    def change(self: Any, *_: Any) -> None:
        for piece in self.sync.pieces[:1]:
            piece.held.data.mul_(1.01)

    after(Training, "__init__", change)


def dropped_microbatch(rank: int) -> None:
    """The last micro-batch has no backward."""
    original = Pipeline.step

    def step(self: Any, number: int, microbatches: Any) -> Any:
        microbatches[-1].weight *= 0.5
        return original(self, number, microbatches)

    Pipeline.step = step  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[int], None]] = {
    "twice the gradient": scaled(2.0), "the last parameter's gradient": scaled(1.01, last=True),
    "the sign": scaled(-1.0), "one rank's gradient": on(0, scaled(1.1)), "an element": element, "mode": mode,
    "reordered": reordered, "a dropped micro-batch": dropped_microbatch, "buffers": lost_buffers,
    "draws": shared_draws, "stale": stale, "no update": no_update, "late rate": late_rate, "norm": own_norm,
    "decay": no_decay, "loss": other_loss, "not reduced": not_reduced, "not tied": not_tied, "initial": initial,
    "an overflow": on(0, scaled(float("inf"))),
}  # fmt: skip

"""Replica: what a rank holds of the model, and how it keeps in step with the ranks that hold the same.

This one keeps in step with nobody: serial training, and a pipeline's stages. The others have the same methods:

    ddp      every replica holds everything; gradients are summed
    dp       rank 0 holds everything, and lends it to the others for each batch
    zero     what they would all hold alike is sharded (`mpkit.parallel.zero`)

A step calls them in this order:

    begin_step           drop or zero the gradients
    before_backward      before each backward; told when it is its stage's last, after which gradients are complete
    after_backward       after each
    after_input_grads    of a backward in two halves, after the first; its second half is between before_backward (and
    before_weight_grads) and after_backward
    finish               wait until the gradients of `pieces` are those of the whole batch
    updated              the optimizer has changed `pieces`: bring the model's parameters up to date
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpkit.parallel.shard import Shard
from mpkit.parallel.stage import Stage

__all__ = ["Piece", "Replica", "named_parameters"]


@dataclass(eq=False)
class Piece:
    """What one rank updates of a parameter: elements `start` to `end` of it, flattened.

    Attributes:
        name: the parameter's, as the model knows it.
        parameter: the whole one, in the model; empty while it is sharded and not gathered. Under tensor parallelism
            this rank's local one, here and below.
        shape: of the whole one.
        start, end: which elements are this rank's.
        held: those elements, as the optimizer is given them: (end - start,), or the parameter itself. After `finish`
            its `grad` is the gradient of the loss over the whole batch; None if it has none.
        shard: which part of the model's parameter the local one is; None: all of it.
        partial: under tensor parallelism, its gradient is a sum of what each rank has found.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    start: int
    end: int
    held: nn.Parameter
    shard: Shard | None = None
    partial: bool = False


class Replica:
    """Alone: gradients are complete when backward is over, and the optimizer works on the parameters themselves.

    Args:
        stages: the parts of the model that this rank computes, by number; on its device.

    Attributes:
        pieces: what this rank updates.
        divided: whether replicas update different pieces (and not the same ones, each for itself).
    """

    divided = False

    def __init__(self, stages: dict[int, Stage]) -> None:
        self.stages = stages
        self.pieces = [
            self._piece(name, parameter, 0, parameter.numel(), parameter)
            for name, parameter in named_parameters(stages).items()
            if parameter.requires_grad
        ]

    def _piece(self, name: str, parameter: nn.Parameter, start: int, end: int, held: nn.Parameter) -> Piece:
        """A piece, with what tensor parallelism has made of its parameter."""
        sharded = next(iter(self.stages.values())).sharded
        shard, partial = sharded.shards.get(name), name in sharded.partial
        return Piece(name, parameter, parameter.shape, start, end, held, shard, partial)

    def frozen(self) -> list[Piece]:
        """What this rank holds of the parameters that are not trained."""
        return [
            self._piece(name, parameter, 0, parameter.numel(), parameter)
            for name, parameter in named_parameters(self.stages).items()
            if not parameter.requires_grad
        ]

    @property
    def layout(self) -> list[str]:
        """Names of the parameters in the order in which their gradients are sent; where none are, none.

        The order in which ranks' gradients are added up depends on it, and with it the last bit of a sum.
        """
        return []

    def lay_out(self, names: list[str]) -> None:
        """Go on with a `layout` of an earlier training, as far as it fits; every rank calls it."""

    def begin_step(self) -> None:
        """Drop the gradients of the step before."""
        for piece in self.pieces:
            piece.parameter.grad = None

    def before_backward(self, last: bool, stage: int = 0) -> None:
        """A backward of a stage begins; with `last`, its gradients may be sent as soon as they are made."""

    def after_backward(self) -> None:
        """A backward is over: what only it needed may go."""

    def after_input_grads(self) -> None:
        """I is over: what only it needed may go."""

    def before_weight_grads(self, stage: int) -> None:
        """W begins."""

    def finish(self) -> None:
        """Wait until each piece's gradient is that of the whole batch."""

    def updated(self) -> None:
        """Bring the model's parameters up to date with the pieces."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, this rank's parameters are whole."""
        yield

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the trained model's state, whole tensors on the CPU; every rank calls it."""
        with self.gathered():
            return {
                name: value for stage in self.stages.values() for name, value in stage.state_dict().items()
            }


def named_parameters(stages: dict[int, Stage]) -> dict[str, nn.Parameter]:
    """The parameters of some stages by the names the model has for them; a tied one once, by its first name."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[name] = parameter
    return found

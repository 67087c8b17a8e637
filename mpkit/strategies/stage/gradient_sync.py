"""GradientSync: a rank's part of the model, and its synchronization with the ranks that hold the same part.

This class synchronizes with nobody: it is for serial training and a pipeline's stages. Others have the same methods:

    ddp      every replica holds everything; gradients are summed
    dp       rank 0 holds everything, and replicates it to the others for each batch
    zero     what all replicas would hold is sharded (`mpkit.strategies.replicas`)

A step goes through these phases, each a method:

    begin_step    drop or zero the gradients
    backward      a context around each backward of a stage, or each half of one (I, W)
    finish        wait until the gradients of `pieces` are those of the whole batch
    renew         after the update of `pieces`: bring the model's parameters up to date

`gathered` and `state_dict` give access to whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mpkit.strategies.stage.shard import HeldPart, Shard
from mpkit.strategies.stage.stage import Stage

Half = Literal["", "I", "W"]
"""Half of a backward: "I" for the inputs' gradients, "W" for the weights', or "" for both at once."""


@dataclass(eq=False)
class Piece:
    """The part of a parameter that one rank updates: its elements `start` to `end`, flattened.

    Attributes:
        name: the parameter's name in the model.
        parameter: the whole parameter, in the model; empty while it is sharded and not gathered. Under tensor
            parallelism this rank's local one, here and below.
        shape: shape of the whole parameter.
        start, end: range of this rank's elements.
        held: those elements, as the optimizer receives them: (end - start,); the parameter itself; or all of it, where
            ZeRO-1 divides by owner. After `finish` its `grad` is the gradient of the loss over the whole batch; None if
            it has none.
        shard: the part of the model's parameter that is local; None if all of it is.
        axis: along which it is divided: "tp", "ep", one's own, or "" if all of it is local.
        partial: whether, under tensor parallelism, the gradient on each rank is a partial sum.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    start: int
    end: int
    held: nn.Parameter
    shard: Shard | None = None
    partial: bool = False
    axis: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it is the model's whole parameter, in its shape."""
        return self.shard is None and self.held.shape == self.shape

    def part(self, tensor: Tensor) -> HeldPart:
        """Return these elements' values in a tensor, such as a state of the optimizer, and where they lie."""
        whole = self.shard.whole if self.shard else tuple(self.shape)
        return HeldPart(tensor.detach().reshape(-1).contiguous(), whole, self.start, self.shard)


class GradientSync:
    """Synchronization without replicas: gradients are complete after the backward, and parameters are updated directly.

    Args:
        stages: the parts of the model that this rank computes, by number, on its device.

    Attributes:
        pieces: the pieces that this rank updates.
        frozen: the pieces that it holds of parameters that are not trained.
        divided: whether replicas update different pieces, instead of each updating the same ones.
    """

    divided = False

    def __init__(self, stages: dict[int, Stage]) -> None:
        self.stages = stages
        self.pieces = [
            self._piece(name, parameter, 0, parameter.numel(), parameter)
            for name, parameter in named_parameters(stages).items()
            if parameter.requires_grad
        ]
        self._trained = [piece.parameter for piece in self.pieces]  # also those that another rank updates
        self.frozen = [
            self._piece(name, parameter, 0, parameter.numel(), parameter)
            for name, parameter in named_parameters(stages).items()
            if not parameter.requires_grad
        ]

    def _piece(self, name: str, parameter: nn.Parameter, start: int, end: int, held: nn.Parameter) -> Piece:
        """Return a piece, with its parameter's shard under tensor parallelism."""
        sharded = next(iter(self.stages.values())).sharded
        shard, partial = sharded.shards.get(name), name in sharded.partial
        axis = sharded.axis_of(name)
        return Piece(name, parameter, parameter.shape, start, end, held, shard, partial, axis)

    def begin_step(self) -> None:
        """Take the first replica's buffers where they changed, and drop the gradients of the previous step."""
        self.synchronize_buffers()
        self.drop_gradients()

    def synchronize_buffers(self) -> None:
        """Take the first replica's buffers where they changed."""

    def drop_gradients(self) -> None:
        """Drop the gradients of the previous step."""
        for parameter in self._trained:
            parameter.grad = None

    @contextmanager
    def backward(self, stage: int = 0, last: bool = True, half: Half = "") -> Iterator[None]:
        """Return a context within which autograd runs a backward of a stage.

        Args:
            stage: the stage's number.
            last: whether the gradients are complete afterwards, and so may be sent as soon as they are made.
            half: "I" for the gradients of the inputs alone, "W" for those of the weights; "" for both at once.
        """
        yield

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Return a context within which the stages' forwards run without a backward; every rank enters it."""
        yield

    def finish(self) -> None:
        """Wait until each piece's gradient is that of the whole batch."""

    def renew(self) -> None:
        """Bring the model's parameters up to date with the pieces."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep this rank's parameters whole inside the block."""
        yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's part of the trained model's state, whole tensors on the CPU; every rank calls it."""
        with self.gathered():
            return {
                name: value for stage in self.stages.values() for name, value in stage.state_dict().items()
            }


def named_parameters(stages: dict[int, Stage]) -> dict[str, nn.Parameter]:
    """Return the parameters of the stages by their names in the model; a tied one once, by its first name."""
    parameters: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                parameters[name] = parameter
    return parameters

"""GradientSync: a rank's part of the model, and its synchronization with the ranks that hold the same part.

This class is for a part that no other rank holds: serial training and a pipeline's stages. Others have its methods:

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
        parameter: the whole parameter, or under tensor parallelism this rank's shard of it, here and below; empty while
            ZeRO-3 has not gathered it.
        held: the elements, as the optimizer receives them: (end - start,); the parameter itself; or all of it, if
            ZeRO-1 divides by owner. After `finish` its `grad`, if any, is the gradient over the whole batch.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    start: int
    end: int
    held: nn.Parameter
    shard: Shard | None = None  # the part of the model's parameter that is local; None if all of it is
    partial: bool = False  # under tensor parallelism: the gradient on each rank is a partial sum
    axis: str = ""  # along which the parameter is divided: "tp", "ep", one's own, or "" if all of it is local

    @property
    def is_whole(self) -> bool:
        """Whether this is the model's whole parameter, in its shape."""
        return self.shard is None and self.held.shape == self.shape

    def part(self, tensor: Tensor) -> HeldPart:
        """Return these elements' values in a tensor, such as a state of the optimizer, with their place."""
        whole = self.shard.whole if self.shard else tuple(self.shape)
        return HeldPart(tensor.detach().reshape(-1).contiguous(), whole, self.start, self.shard)


class GradientSync:
    """Synchronization without replicas: gradients are complete after the backward, and parameters are updated directly.

    `pieces` are those that this rank updates, and `frozen` those that it holds of parameters that are not trained.
    """

    divided = False  # replicas update different pieces, instead of each updating the same ones

    def __init__(self, stages: dict[int, Stage]) -> None:
        self.stages = stages
        whole = [self._piece(n, p, 0, p.numel(), p) for n, p in named_parameters(stages).items()]
        self.pieces = [piece for piece in whole if piece.parameter.requires_grad]
        self._trained = [piece.parameter for piece in self.pieces]  # also those that another rank updates
        self.frozen = [piece for piece in whole if not piece.parameter.requires_grad]

    def _piece(self, name: str, parameter: nn.Parameter, start: int, end: int, held: nn.Parameter) -> Piece:
        """Return a piece, with its parameter's shard under tensor parallelism."""
        sharded = next(iter(self.stages.values())).sharded
        divided = sharded.shards.get(name), name in sharded.partial, sharded.axis_of(name)
        return Piece(name, parameter, parameter.shape, start, end, held, *divided)

    def begin_step(self) -> None:
        """Take the first replica's changed buffers, and drop the gradients of the previous step."""
        self.synchronize_buffers()
        self.drop_gradients()

    def synchronize_buffers(self) -> None:
        """Take the first replica's changed buffers."""

    def drop_gradients(self) -> None:
        """Drop the gradients of the previous step."""
        for parameter in self._trained:
            parameter.grad = None

    @contextmanager
    def backward(self, stage: int = 0, last: bool = True, half: Half = "") -> Iterator[None]:
        """Return a context within which autograd runs a backward of a stage, or a half of it.

        After the `last` one the gradients are complete, and so may be sent as soon as they are made.
        """
        yield

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Return a context for forwards without a backward; every rank enters it."""
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
            states = [stage.state_dict() for stage in self.stages.values()]
            return {name: value for state in states for name, value in state.items()}


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

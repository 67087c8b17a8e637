"""What the references of training take, and the parts of it that are a rank's own.

ctx          of this rank, one of n
model        whole, the same on every rank; of a pipeline `stages`, one module per rank
batches      (inputs, targets), whole; n divides their b samples
loss         the mean over samples, of (outputs, targets)
optimizer    makes one of parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

import mpkit as mk

Batches = Sequence[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def share_of(ctx: mk.Context, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return this rank's b / n samples: inputs and targets."""
    inputs, targets = (part.chunk(ctx.world_size)[ctx.rank] for part in batch)
    return inputs, targets


def shard_of(ctx: mk.Context, tensor: Tensor) -> Tensor:
    """Return this rank's n-th of the elements of a tensor, flat; n divides their
    number. It is a view.
    """
    return tensor.detach().view(-1).chunk(ctx.world_size)[ctx.rank]

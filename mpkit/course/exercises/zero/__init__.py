"""ZeRO.

Data parallelism gives every rank 16 bytes per parameter, and all ranks the same. ZeRO keeps one copy among all ranks:
first of the optimizer states, then of the gradients, then of the parameters. Here you write the three stages, count
their bytes, and meet the places where a sharded training goes wrong.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from mpkit.course.framework import serial

if TYPE_CHECKING:
    from torch import Tensor

    from mpkit.course.framework.exercise import Case

TITLE = "ZeRO"
PLACE = 3


# %% given
def flat(tensors: Iterable[Tensor], n: int) -> Tensor:
    """Concatenate all tensors, and append zeros until n divides the length."""
    import torch

    whole = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return torch.nn.functional.pad(whole, (0, -len(whole) % n))


def unflat(whole: Tensor, tensors: Iterable[Tensor]) -> None:
    """Copy what `flat` put together back into the tensors."""
    first = 0
    for tensor in tensors:
        tensor.detach().copy_(whole[first : first + tensor.numel()].view_as(tensor))
        first += tensor.numel()


# %% checks
SAMPLES = 12
"""Of all ranks together, in a batch."""


def shares(case: Case, rank: int, steps: int) -> list[serial.Batch]:
    """Return a rank's samples of each step's batch."""
    return [serial.share(batch, rank, case.ranks) for batch in serial.batches(case, SAMPLES, steps)]


def weights_of_adam(case: Case, steps: int, widths: Sequence[int] = serial.WIDTHS) -> list[dict[str, Tensor]]:
    """Return the weights that serial training by Adam gives, for every rank."""
    model, data = serial.model(case.seed, widths), serial.batches(case, SAMPLES, steps)
    return [serial.train(model, data, optimizer=serial.adam)["weights"]] * case.ranks


def shard_bytes(case: Case) -> int:
    """Return the bytes of one rank's n-th of the parameters."""
    psi = sum(weight.numel() for weight in serial.model(0).parameters())
    return -(-psi // case.ranks) * 8


def square_layers(case: Case, layers: int, width: int) -> list[Tensor]:
    """Return the flat parameters of some layers from h to h, [h * h] each."""
    generator, scale = case.generator(555), 1.5 / width**0.5
    return [
        torch.randn(width * width, generator=generator, dtype=torch.float64) * scale for _ in range(layers)
    ]

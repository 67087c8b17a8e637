"""ZeRO.

Data parallelism gives every rank 16 bytes per parameter, and all ranks the same. ZeRO keeps one copy among all ranks:
first of the optimizer states, then of the gradients, then of the parameters. Here you write the three stages, count
their bytes, and meet the places where a sharded training goes wrong.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

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

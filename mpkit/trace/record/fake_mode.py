"""Torch's mode of tensors without content, with operations that its kernels accept and its shape rules reject."""

from typing import Any

import torch
from torch import Tensor

from mpkit.common.torch_private import FakeTensorMode, _grouped_mm


class FakeMode(FakeTensorMode):
    """A mode in which every operation computes shapes and no numbers; it accepts tensors with content.

    Torch's rule for grouped products, which experts use, demands bfloat16, as of 2.13; its kernels also run 32 bits.

    >>> with FakeMode():
    ...     tokens, experts, ends = torch.empty(10, 4), torch.empty(3, 4, 6), torch.empty(3, dtype=torch.int32)
    ...     print(torch.nn.functional.grouped_mm(tokens, experts, offs=ends).shape)
    torch.Size([10, 6])
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the results of an operator, without content."""
        if func is _grouped_mm.default and args[0].dtype != torch.bfloat16:
            shape = _grouped_shape(args[0], args[1], args[2] if len(args) > 2 else (kwargs or {}).get("offs"))
            with self:
                return torch.empty(shape, dtype=args[0].dtype, device=args[0].device)
        return super().dispatch(func, types, args, kwargs or {})


def _grouped_shape(a: Tensor, b: Tensor, ends: Tensor | None) -> list[int]:
    """Return the shape of a grouped product: groups are rows of a, columns of b, parts of the sum, or matrices.

    >>> tokens, weights, ends = torch.empty(10, 4), torch.empty(3, 4, 6), torch.tensor([3, 7, 10])
    >>> _grouped_shape(tokens, weights, ends), _grouped_shape(tokens.T, torch.empty(10, 6), ends)
    ([10, 6], [3, 4, 6])
    """
    each = [a.shape[-2], b.shape[-1]]
    if a.dim() == 2 and b.dim() == 2:
        assert ends is not None  # of the parts that are summed
        return [len(ends), *each]
    return [len(a), *each] if a.dim() == 3 and b.dim() == 3 else each

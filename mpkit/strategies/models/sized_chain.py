"""The kit's models are chains: an nn.Sequential with a constructor of its own, whose slices are plain ones."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["SizedChain"]


class SizedChain(nn.Sequential):
    """An nn.Sequential that is made from sizes, and not from its children as its slices are.

    >>> class Two(SizedChain):
    ...     def __init__(self, width: int) -> None:
    ...         super().__init__(nn.Linear(width, width), nn.Tanh())
    >>> Two(3)[1:]
    Sequential(
      (1): Tanh()
    )
    """

    def __getitem__(self, index: slice | int) -> Any:
        """Return a child; of a slice, an nn.Sequential of these children under their names."""
        whole = nn.Sequential()
        whole._modules = self._modules
        return whole[index]

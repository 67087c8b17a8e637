"""Exceptions that end the dry run of an opened model."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpkit.strategies.partition.walk import current_walk

__all__ = ["CannotCut", "EnteredFromOutside", "tell_if_entered"]


class CannotCut(Exception):
    """What an opened module does between its blocks cannot be divided among ranks.

    Attributes:
        scope: the name of the module.
    """

    def __init__(self, scope: str, why: str) -> None:
        super().__init__(why)
        self.scope = scope


class EnteredFromOutside(Exception):
    """A submodule of a block is called from outside, so the block must be opened.

    Attributes:
        block: the name of the block.
    """

    def __init__(self, block: str) -> None:
        super().__init__(f"{block} is entered from outside")
        self.block = block


def tell_if_entered(name: str, block: nn.Module) -> None:
    """Let the dry run detect that a block is entered from outside.

    An example is OPTForCausalLM, which calls its model's decoder and not its model.
    """

    def check(*_: Any) -> None:
        if current_walk() is not None:
            raise EnteredFromOutside(name)

    for inner in block.modules():
        if inner is not block and not isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
            inner.register_forward_pre_hook(check)

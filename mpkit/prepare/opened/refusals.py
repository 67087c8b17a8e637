"""What the dry run of an opened model cannot go on with."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpkit.parallel.anymodel.walk import current_walk

__all__ = ["CannotCut", "Entered", "tell_if_entered"]


class CannotCut(Exception):
    """What an opened module does between its blocks cannot be divided among ranks.

    Attributes:
        scope: the module.
    """

    def __init__(self, scope: str, why: str) -> None:
        super().__init__(why)
        self.scope = scope


class Entered(Exception):
    """What is within a block is called from outside: the block has to be opened.

    Attributes:
        block: its name.
    """

    def __init__(self, block: str) -> None:
        super().__init__(f"{block} is entered from outside")
        self.block = block


def tell_if_entered(name: str, block: nn.Module) -> None:
    """Let the dry run notice it, as where OPTForCausalLM calls its model's decoder, and not its model."""

    def check(*_: Any) -> None:
        if current_walk() is not None:
            raise Entered(name)

    for inner in block.modules():
        if inner is not block and not isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
            inner.register_forward_pre_hook(check)

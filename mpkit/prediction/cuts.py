"""Where to cut a model into stages: by the measured time of its blocks on this machine, by FLOPs, or by memory.

    blocks     found in the model as it is (`mpkit.strategies.prepare.partition`)
    cost       of each block: measured or counted
    balance    contiguous stages, the most expensive of which is as cheap as possible (`mpkit.models.balance`)
    crossing   the tensors that then cross from stage to stage

A Plan without `cut` balances FLOPs. This module looks more closely and reports what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpkit.common.tracebacks import public
from mpkit.plan.plan import Plan
from mpkit.strategies.loss.counted import Quotient
from mpkit.strategies.prepare.find_cut import BY, Cut, find

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_cut"]


@public
def find_cut(
    model: nn.Module,
    batch: tuple[Any, Any],
    stages: int,
    *,
    loss: Callable[[Any, Any], Any],
    by: str = "time",
    microbatches: int = 1,
) -> Cut:
    """Find where a model is best cut into stages.

    Args:
        model: any module; it is left unchanged.
        batch: (inputs, targets), as training takes them.
        stages: the number of stages.
        loss: loss(outputs, targets) -> scalar, or (total, count).
        by: what is balanced: "time" (measured here, on the CPU), "flops", or "memory".
        microbatches: the number of parts that the batch is split into; a block is measured on one of them.

    >>> import torch
    >>> from mpkit.models import UNet
    >>> data = torch.zeros(2, 1, 16, 16), torch.zeros(2, 16, 16, dtype=torch.long)
    >>> print(find_cut(UNet(1, 2), data, 3, loss=torch.nn.functional.cross_entropy, by="flops"))
    balanced by flops (FLOPs of the forward); cut=...
    stage  share  parameters  keeps    sends to              blocks
    0      ...
    1      ...
    2      ...

    Raises:
        ValueError: the model cannot be cut into this many stages; the message says where and why.
    """
    if by not in BY:
        raise ValueError(f"find_cut(by={by!r}): there are {', '.join(map(repr, BY))}, such as by='flops'")
    plan = Plan(pp=stages, microbatches=microbatches)
    return find(model, batch, plan, Quotient(loss), by)

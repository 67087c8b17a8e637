"""Where a model is best cut into stages: by what its blocks really take here, by FLOPs, or by memory.

    blocks     found in the model as it is (`mpkit.prepare.opened`)
    cost       of each: measured, or counted
    balance    contiguous stages, the dearest as cheap as can be (`mpkit.models.balance`)
    crossing   what then goes from stage to stage

A Plan without `cut` balances FLOPs. This looks closer, and says what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpkit.loss.quotient import Quotient
from mpkit.plan import Plan
from mpkit.tracebacks import public

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Cut", "StageFound", "find_cut"]

BY = {
    "time": "measured seconds of forward and backward",
    "flops": "FLOPs of the forward",
    "memory": "bytes of weights, gradients, Adam's two states, and one micro-batch's activations",
}


@dataclass(frozen=True)
class StageFound:
    """A stage, as it would be.

    Attributes:
        blocks: by name, in order.
        cost: in the unit of `Cut.by`.
        share: of the whole.
        parameters: how many.
        kept: bytes that a micro-batch keeps for its backward.
    """

    blocks: list[str]
    cost: float
    share: float
    parameters: int
    kept: int


@dataclass(frozen=True)
class Cut:
    """Where to cut, and why there. `Plan(cut=found.points, ...)` takes it; `print` shows it.

    Attributes:
        points: the first block of each stage but stage 0, as `Plan.cut` wants them.
        by: what was balanced, a key of `BY`.
        stages: what they would be.
        sends: bytes of a micro-batch that go forward from one stage to another, by (source, target).
        tied: weights that several stages would compute with, with those stages.
    """

    points: list[int | str]
    by: str
    stages: list[StageFound]
    sends: dict[tuple[int, int], int]
    tied: dict[str, list[int]]

    def __str__(self) -> str:
        rows = [("stage", "share", "parameters", "keeps", "sends to", "blocks")]
        for number, stage in enumerate(self.stages):
            sends = [f"{to}: {_bytes(n)}" for (source, to), n in self.sends.items() if source == number]
            first, last = stage.blocks[0], stage.blocks[-1]
            blocks = first if first == last else f"{first} to {last}"
            kept, share = _bytes(stage.kept), f"{stage.share:.0%}"
            rows.append((str(number), share, f"{stage.parameters:,}", kept, ", ".join(sends) or "-", blocks))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        tied = [f"tied: {name}, in stages {', '.join(map(str, at))}" for name, at in self.tied.items()]
        return "\n".join([f"balanced by {self.by} ({BY[self.by]}); cut={self.points}", *lines, *tied])


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
    """Where a model is best cut into stages.

    Args:
        model: any module; left as it is.
        batch: (inputs, targets), such as training takes.
        stages: how many.
        loss: loss(outputs, targets) -> scalar, or (total, count).
        by: what is balanced: "time" (measured here, on the CPU), "flops", or "memory".
        microbatches: the parts that the batch is split into; a block is looked at on one of them.

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
        ValueError: the model cannot be cut into so many stages; with where and why.
    """
    from mpkit.prepare.opened.finding import find

    if by not in BY:
        raise ValueError(f"find_cut(by={by!r}): there are {', '.join(map(repr, BY))}, such as by='flops'")
    plan = Plan(pp=stages, microbatches=microbatches)
    return find(model, batch, plan, Quotient(loss), by)


def _bytes(n: int) -> str:
    """As a table shows it.

    >>> _bytes(1500), _bytes(40)
    ('1.5 kB', '40 B')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"

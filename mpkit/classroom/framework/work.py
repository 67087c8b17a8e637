"""How much each rank computes: whether ranks divide the work, or each does all of it.

Serial training on every rank gives right results and is no parallelism. It computes as many times too much as there
are ranks; so does an answer that gathers everything first, and one whose ranks leave the work to one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from mpkit.classroom.framework.exercise import Mistake, Row
from mpkit.classroom.framework.seen import Seen
from mpkit.record.operators import flops_of

__all__ = ["UNDIVIDED", "Work", "work_row"]

ROOM = 1.75
"""How many times the work of the solution's busiest rank a rank may do: a forward twice, and not all of two shares."""

WHAT = "work of the busiest rank"

UNDIVIDED = Mistake(
    name="work-not-divided",
    hints=(
        "The results are right. How many samples, layers or columns does each rank compute, and how many are there?",
        "A rank computes about as much as all ranks together should. Then nothing is gained by having several: each "
        "has to compute its own part only, and to send what the others need of it.",
    ),
    wrong=(),
    when=lambda seen: seen.budget == WHAT,
)


class Work(TorchDispatchMode):
    """Counts the FLOPs of matrix products and convolutions of this thread, a multiply-add as two.

    >>> import torch
    >>> with Work() as work:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> work.flops
    48.0
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute, and count."""
        out = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, out)
        return out


def work_row(seen: Seen, target: Seen) -> Row | None:
    """Check that no rank computes much more than the solution's busiest one; None if the solution computes nothing."""
    most = max(target.work, default=0.0)
    if most == 0.0:
        return None
    times = max(seen.work) / most
    return Row(
        f"{WHAT}, on {seen.case}",
        f"at most {ROOM:g} times that of a right answer",
        f"{times:.2g} times",
        times <= ROOM,
        replace(seen, budget=WHAT, target=target),
    )

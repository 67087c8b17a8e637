"""Stages that an answer runs itself, on the timeline: forwards and backwards with the FLOPs of a larger model.

The models of exercises are tiny, and a GPU would take almost no time for them. So each forward is recorded with the
FLOPs of a larger layer, and each backward with twice as many: on the clock of the machine that answers are replayed on,
they take a few times as long as a message. What recomputes a stage is written by hand: torch.utils.checkpoint raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

from torch import Tensor, nn

from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


FLOPS = 2e8
"""FLOPs of a forward."""

M = TypeVar("M", bound=nn.Module)


def record_stage(ctx: Context, stage: M, number: int | None = None, microbatches: int | None = None) -> M:
    """Record the stage's forwards and backwards from now on; return the stage itself.

    Args:
        ctx: the rank's context.
        stage: the stage's module.
        number: the stage's number; None: the same as the rank's.
        microbatches: the number of forwards after which all later ones are recomputation; None: none is.
    """
    record, which = ctx.record, ctx.rank if number is None else number
    forwards, backwards = 0, 0

    def backward(gradient: Tensor) -> None:
        nonlocal backwards
        record.end(record.begin(Kind.BACKWARD, stage=which, microbatch=backwards, flops=2 * FLOPS))
        backwards += 1

    def forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal forwards
        again = microbatches is not None and forwards >= microbatches
        kind, i = (Kind.RECOMPUTE, forwards - (microbatches or 0)) if again else (Kind.FORWARD, forwards)
        record.end(record.begin(kind, stage=which, microbatch=i, flops=FLOPS))
        forwards += 1
        if output.requires_grad:
            output.register_hook(backward)

    stage.register_forward_hook(forward)
    return stage


WHY = "torch.utils.checkpoint is what this exercise asks you to write"


class _LibraryRefusal:
    """In place of what `torch.utils.checkpoint.checkpoint` calls, in both of its ways."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(WHY)

    apply = __call__


@contextmanager
def checkpoint_by_hand() -> Iterator[None]:
    """Let torch.utils.checkpoint raise, however an answer has imported it.

    >>> import torch
    >>> with checkpoint_by_hand():
    ...     torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(1), use_reentrant=False)
    Traceback (most recent call last):
    RuntimeError: torch.utils.checkpoint is what this exercise asks you to write
    """
    module = "torch.utils.checkpoint"
    with ExitStack() as stack:
        for name in ("CheckpointFunction", "_checkpoint_without_reentrant_generator"):
            stack.enter_context(patch(f"{module}.{name}", _LibraryRefusal()))
        yield

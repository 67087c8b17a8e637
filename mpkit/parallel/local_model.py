"""What a rank makes of the model before anything else: its shard of each layer, its part of each sequence.

    shard       tensor parallelism: parameters replaced by this rank's parts (`mpkit.parallel.tensor`)
    positions   context parallelism: the model is told where its tokens stand (`mpkit.parallel.context`)

The same on a rank, with its axes, and in the parent's dry run, with axes that are pretended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from mpkit.parallel.axis import Line
from mpkit.parallel.context.inside import ContextParallel
from mpkit.parallel.context.positions import shift_positions
from mpkit.parallel.tensor import Sharded, shard_model
from mpkit.plan import Plan
from mpkit.schedule import build

__all__ = ["attention_over", "localize", "splits_backward"]


def localize(model: nn.Module, plan: Plan, tp: Line, cp: Line) -> Sharded:
    """Shard a model in place, and tell it its positions.

    Args:
        model: whole; its tensors are left as they are.
        plan: tensor, sequence_parallel, cp_order and schedule.
        tp, cp: this rank's lines.

    Raises:
        ValueError: the model cannot be divided so.
    """
    # ---- shard
    sharded = shard_model(
        model, tp, plan.tensor, sequence=plan.sequence_parallel, overlap=not splits_backward(plan)
    )
    # ---- positions
    if cp.size > 1:
        shift_positions(model, cp, plan.cp_order)
    return sharded


def attention_over(plan: Plan, cp: Line) -> Callable[[], AbstractContextManager[Any]]:
    """What a forward is entered in, so that its attention is over whole sequences."""
    return nullcontext if cp.size == 1 else partial(ContextParallel, cp, plan.cp_order)


def splits_backward(plan: Plan) -> bool:
    """Whether the schedule does some backward in two halves."""
    return any(action.kind == "W" for row in build(plan).rows for action in row)

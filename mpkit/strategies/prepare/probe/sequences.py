"""Checks the loss of parts of sequences, into which context parallelism divides them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpkit.plan.plan import Plan
from mpkit.strategies.context.sequence import sequence_part
from mpkit.strategies.data.microbatch import Value, leaves
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.prepare.arguments.task import Rejection
from mpkit.strategies.prepare.probe.compare import ROUNDING
from mpkit.strategies.prepare.probe.draws import SameDraws
from mpkit.strategies.prepare.probe.trial import ProbeResult

__all__ = ["check_sequence_loss"]


def check_sequence_loss(plan: Plan, loss: Callable[[Any, Any], Any], outputs: Any, targets: Value) -> None:
    """Check that the loss of all tokens equals the combined losses of each rank's tokens.

    Raises:
        Rejection: the losses differ.
    """
    s = leaves(targets)[0].shape[1]
    made, shape = flatten(outputs)
    if not all(not isinstance(leaf, Tensor) or (leaf.dim() > 1 and leaf.shape[1] == s) for leaf in made):
        return  # outputs without a sequence dimension: it is not known here which part a rank has

    def loss_of_rank(rank: int) -> Any:
        cut = partial(sequence_part, index=rank, n=plan.cp, order=plan.cp_order, row=plan.mesh.cp_ulysses)
        mine = [cut(leaf) if isinstance(leaf, Tensor) else leaf for leaf in made]
        return loss(rebuild(shape, mine), cut(targets))

    whole, parts = ProbeResult(), ProbeResult()
    with torch.no_grad(), SameDraws():  # type: ignore[no-untyped-call]
        whole.add_up([loss(outputs, targets)], [1.0])
        parts.add_up([loss_of_rank(rank) for rank in range(plan.cp)], [1 / plan.cp] * plan.cp)
    if abs(whole.loss - parts.loss) > 10 * ROUNDING * abs(whole.loss):
        raise Rejection(
            f"{plan}: with cp={plan.cp} each rank has a part of every sequence, and the loss of some samples is "
            f"{whole.loss:.6g}, but {parts.loss:.6g} when put together from the parts: it looks at a token's "
            "neighbours, or is no mean over tokens. What works: shift targets in the data and not in the loss; for "
            "ignored targets a loss that returns (total, count), or loss=mk.mean_loss(lambda out, y: "
            f"F.cross_entropy(out.flatten(0, 1), y.flatten())); or a plan with cp=1, such as mk.Plan.ddp({plan.ranks})."
        )

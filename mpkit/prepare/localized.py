"""The model as one rank will have it, for the dry runs: sharded, and told its positions."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from mpkit.parallel.axis import Pretended
from mpkit.parallel.context.checks import check_context_parallel
from mpkit.parallel.context.sequence import sequence_part
from mpkit.parallel.local_model import attention_over, localize
from mpkit.parallel.microbatch import Value
from mpkit.parallel.shard import Sharded
from mpkit.plan import Plan
from mpkit.prepare.arguments import one_line
from mpkit.prepare.copying import copied

__all__ = ["Localized", "local_copy"]


@dataclass(frozen=True)
class Localized:
    """What a rank has.

    Attributes:
        model: its own; the caller's where nothing is shared.
        sharded: what tensor parallelism has made of it.
        cut: of inputs or targets the part that it takes.
        attention: what its forward is entered in.
        tp: whom it shares its layers with.
    """

    model: nn.Module
    sharded: Sharded
    cut: Callable[[Value], Value]
    attention: Callable[[], AbstractContextManager[Any]]
    tp: Pretended


def local_copy(model: nn.Module, plan: Plan, batch: tuple[Value, Value], place: int = 0) -> Localized:
    """That of a rank.

    Args:
        model: left as it is.
        plan: tp, cp and what goes with them.
        batch: the largest one, whose sequences are shared.
        place: the rank's along tp; along cp it is the first.

    Raises:
        ValueError: layers or sequences cannot be shared by so many.
    """
    if plan.cp > 1 and place == 0:
        check_context_parallel(model, *batch, plan.cp, plan.cp_order)
    tp, cp = Pretended(plan.tp, place), Pretended(plan.cp)
    sharded = Sharded()
    if plan.tp > 1 or plan.cp > 1:
        # The tensors are the caller's: shards are copies, and nothing else is written into.
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        try:
            model = copied(model, dict(tensors))
        except (TypeError, RuntimeError, AttributeError, pickle.PicklingError) as error:
            raise ValueError(
                f"The model cannot be copied, and so not sent to the ranks: {one_line(error)}. Locks, open files and "
                "generators are made in forward, or left out by the module's __getstate__."
            ) from None
        sharded = localize(model, plan, tp, cp)
    cut = partial(sequence_part, index=0, n=plan.cp, order=plan.cp_order)
    return Localized(model, sharded, cut, attention_over(plan, cp), tp)

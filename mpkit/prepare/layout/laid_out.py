"""What the ranks will do, determined beforehand: shapes, FLOPs, and which rank has which part of the model.

    local      copy the model as a rank has it (`localized`)
    dry run    run it on fake tensors
    stages     decide where to cut it

Tensor-parallel ranks have shards. If t divides everything, all shards have the same shapes and one dry run serves all
ranks; otherwise each place along tp has its own dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mpkit.data.microbatch import Value
from mpkit.models.chain import is_chain, layers_of
from mpkit.parallel.job.job import LocalNumbers
from mpkit.parallel.partition.boundary import LayerNumbers, Shared
from mpkit.parallel.partition.graph import PartitionedModel
from mpkit.parallel.stage.shard import Sharded
from mpkit.plan.plan import Plan
from mpkit.prepare.dry_run.dry_run import dry_run
from mpkit.prepare.layout.localized import Localized, local_copy
from mpkit.prepare.layout.stages import cut_stages, shared_weights
from mpkit.prepare.partition import open_for_draws, open_model

__all__ = ["LaidOut", "lay_out"]

Loss = Callable[[Any, Any], Any]
Numbers = dict[Hashable, list[LayerNumbers]]


@dataclass
class LaidOut:
    """Which rank has which part of the model.

    Attributes:
        stages: the layers of each stage, by number; empty for a partitioned model.
        placed: the layers of each stage, by name; the blocks for a partitioned model.
        shared: tied weights that several stages compute with.
        by_place: a rank's numbers for a micro-batch, by place along tp; only one entry if all are the same.
        sharded: the shards, by place along tp.
        loss_sends: bytes that the loss of the largest micro-batch all-reduces and all-gathers at place 0 along tp.
    """

    stages: list[range]
    placed: list[list[str]]
    shared: list[Shared]
    by_place: list[LocalNumbers]
    sharded: list[Sharded] = field(default_factory=list)
    loss_sends: tuple[int, int] = (0, 0)


def lay_out(
    model: nn.Module, sizes: list[tuple[Value, Value]], plan: Plan, loss: Loss, *, by_name: bool
) -> LaidOut:
    """Determine which rank has which part of the model.

    Args:
        model: the whole model, on the CPU; it is not changed.
        sizes: a batch of every size that occurs, the largest first.
        plan, loss: the plan and loss of the training.
        by_name: as in `prepare`.

    Raises:
        ValueError: model, data and plan do not fit together.
    """
    # ---- local
    first = local_copy(model, plan, sizes[0])
    copies = [first]
    last = first if plan.tp == 1 else local_copy(model, plan, sizes[0], plan.tp - 1)
    if _shapes(first) != _shapes(last):
        copies += [local_copy(model, plan, sizes[0], place) for place in range(1, plan.tp - 1)] + [last]
    # ---- dry run
    sends = _LossSends(loss, first)
    found = [_dry_run(local, sizes, plan, sends if local is first else loss) for local in copies]
    opened: list[PartitionedModel | None] = [None] * len(copies)
    if plan.stages > 1 and not is_chain(model):
        for i, local in enumerate(copies):
            opened[i] = open_model(
                local.model, sizes, plan, loss,
                relays=not by_name, cut=local.cut, attention=local.attention, like=opened[0],
            )  # fmt: skip
    elif plan.ranks == 1 and not plan.zero and not is_chain(model):
        opened[0] = open_for_draws(model, sizes, plan, loss)
    by_place = [LocalNumbers(*pair) for pair in zip(found, opened, strict=True)]
    # ---- stages
    layers, whole = layers_of(model), opened[0]
    if whole is not None:
        placed = [list(blocks) for blocks in whole.placed]
        laid = LaidOut([range(1)] * plan.stages, placed, whole.shared, by_place)
    else:
        stages = cut_stages([name for name, _ in layers], next(iter(found[0].values()))[:-1], plan)
        placed = [[layers[i][0] for i in stage] for stage in stages]
        laid = LaidOut(stages, placed, shared_weights(layers, stages), by_place)
    laid.sharded = [local.sharded for local in copies]
    laid.loss_sends = sends.most
    for local in {id(each): each for each in (*copies, last)}.values():
        _let_go(local)
    return laid


def _let_go(local: Localized) -> None:
    """Free the copy's shards, which would otherwise stay until Python collects reference cycles.

    All other tensors are the caller's.
    """
    for name in local.sharded.shards:
        local.model.get_parameter(name).data = torch.empty(0)


class _LossSends:
    """A loss whose communication is counted: for vocab-parallel logits a few numbers per token, or an all-gather.

    Attributes:
        most: bytes reduced and gathered by the call with the most.
    """

    def __init__(self, loss: Loss, local: Localized) -> None:
        self._loss, self._line = loss, local.tp
        self.most = (0, 0)

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the loss and count its communication."""
        before = self._line.reduced, self._line.gathered
        value = self._loss(outputs, targets)
        self.most = max(self.most, (self._line.reduced - before[0], self._line.gathered - before[1]), key=sum)
        return value


def _shapes(local: Localized) -> dict[str, tuple[int, ...]]:
    return {name: shard.shape for name, shard in local.sharded.shards.items()}


def _dry_run(local: Localized, sizes: list[tuple[Value, Value]], plan: Plan, loss: Loss) -> Numbers:
    return dry_run(
        local.model, sizes, plan.microbatches, loss,
        counts=plan.stages == 1 or is_chain(local.model), replicas=plan.dp, precision=plan.precision,
        whole_statistics=plan.dp > 1 and plan.batchnorm == "sync", cut=local.cut, attention=local.attention,
    )  # fmt: skip

"""hpZ of ZeRO++: ZeRO-3 with a secondary shard of parameters inside the node, from which the backward gathers.

    forward     a layer's first gather since the update is among all n ranks, as in ZeRO-3; of what arrives, the rank
                keeps the s-th part, its secondary shard
    backward    gathers are among the s ranks of its group, so that none crosses to another node; and so are those of
                later micro-batches, and of recomputation
    update      the primary shards; the secondary ones are stale

A rank holds psi/n + psi/s parameters. Gathers among all ranks send psi (n-1)/n per step instead of 2 psi (n-1)/n.
Gradients are reduced among all ranks, as in ZeRO-3. (ZeRO++ gathers in the forward of each micro-batch among all.)
`mpkit.strategies.reference.secondary_shards` is the algorithm in 40 lines.

Source: Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv 2306.10209,
section 3.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.process_group import PendingWork
from mpkit.strategies.data_parallel.replicated_part import ReplicatedPart
from mpkit.strategies.zero.flat import Flat, FlatLayout, ShardedFlat
from mpkit.strategies.zero.units import Unit
from mpkit.strategies.zero.zero3 import Zero3
from mpkit.trace.record.recorder import Recorder

__all__ = ["SecondaryFlat", "SecondaryZero3"]


class SecondaryFlat(ShardedFlat):
    """A flat tensor of n k elements with a second division: among s ranks, s out of n, n k / s elements each.

    Args:
        layout, record, category, shard_group: as in `Flat`.
        secondary_group: the s ranks.

    Attributes:
        fresh: whether the secondary shard has the values of the primary ones.
    """

    def __init__(
        self, layout: FlatLayout, record: Recorder, category: str,
        shard_group: Communicator, secondary_group: Communicator,
    ) -> None:  # fmt: skip
        super().__init__(layout, record, category, shard_group)
        self.fresh, self._group = False, secondary_group
        self._secondary = torch.zeros_like(self._part_of(self.whole))
        record.ledger.track(self._secondary, category)

    def _part_of(self, whole: Tensor) -> Tensor:
        return whole.chunk(self._group.size)[self._group.index]

    def start_all_gather(self) -> PendingWork:
        """Start gathering the secondary shards, or the primary ones if those are stale."""
        if self.fresh:
            return self._group.all_gather(self._secondary, async_op=True, out=self.whole)
        self.fresh = True
        return _SecondaryRefresh(super().start_all_gather(), self._part_of(self.whole), self._secondary)

    def expire(self) -> None:
        """Note that the primary shards have changed, or may have."""
        self.fresh = False


class _SecondaryRefresh(NamedTuple):
    """An all-gather of primary shards, after which this rank keeps its secondary one."""

    work: PendingWork
    part: Tensor
    secondary: Tensor

    @torch.no_grad()
    def wait(self) -> Tensor:
        """Wait, and keep the part."""
        whole = self.work.wait()
        self.secondary.copy_(self.part)
        return whole


class SecondaryZero3(Zero3):
    """Stage 3 whose parameters are also sharded within groups. Experts are not: few ranks hold the same ones.

    Args:
        held: this rank's part of the model, and its replicas.
    """

    def _new_flat(self, unit: Unit, layout: FlatLayout, held: ReplicatedPart) -> Flat:
        """Return a flat tensor for a unit's parameters, with a secondary shard of it."""
        if unit.parameters[0] in held.expert_parameters:
            return super()._new_flat(unit, layout, held)
        assert held.secondary is not None
        return SecondaryFlat(layout, self._record, "params", held.replicas, held.secondary)

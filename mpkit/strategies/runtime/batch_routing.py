"""Routing that depends on the whole batch, of which a rank has a share: micro-batches, samples, parts of sequences.

    bias             at the end of a step, the rows of all ranks and micro-batches are summed; the bias moves by them
    auxiliary loss   f is summed at the first backward of a layer in a step, by when all its forwards are done

A capacity depends on the order of all tokens of the batch: plans that divide it are rejected
(`mpkit.strategies.prepare.balanced_routing`).
`mpkit.strategies.models.experts.routing` says what this is of the whole batch. A forward that is repeated counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.experts.known_experts import find_balanced
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.experts import MixtureOfExperts
from mpkit.strategies.models.experts.routing import BatchShare, WholeBatch
from mpkit.strategies.stage.stage import Stage

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["BatchRouting"]


class BatchRouting(WholeBatch):
    """The layers with balanced routing of one rank, step after step.

    Args:
        context: this rank's context.
        job: read for the model, of which this rank's layers have weights, and the plan.
        axes: the mesh's axes.
        stages: the parts of the model that this rank computes.
    """

    def __init__(self, context: Context, job: TrainJob, axes: MeshAxes, stages: Mapping[int, Stage]) -> None:
        self._record, self._axes, self._microbatches = context.record, axes, list[MicroBatch]()
        self._layers = find_balanced(job.what.model)
        held = {module for stage in stages.values() for module in stage.layers.modules()}
        self._moved = [layer for layer in self._layers.values() if layer in held and layer.bias_rate]
        self.loss_scale, self._device = 1.0, context.device
        self._rows: dict[MixtureOfExperts, dict[int, Tensor]] = {}  # by micro-batch
        self._summed: dict[MixtureOfExperts, Tensor] = {}
        if not self._layers:
            return
        for layer in self._layers.values():
            layer.batch = self
        plan = job.plan
        t = plan.tp if plan.sequence_parallel else 1
        self._group = axes.communicator_of("dp", "cp", *(("tp",) if t > 1 else ()))
        self._parts_by_tp = t

    # ---- the step -----------------------------------------------------------------------------------------

    def begin_step(self, microbatches: Sequence[MicroBatch], loss_scale: float) -> None:
        """Move biases; note the micro-batches of the next step, and the factor of its gradients."""
        self._microbatches, self.loss_scale = list(microbatches), loss_scale
        for kept in (self._rows, self._summed):
            kept.clear()
        for layer in self._moved:
            layer.move_bias()

    def begin(self, layer: MixtureOfExperts) -> None:
        """Leave the bias as it is: a step has several forwards, and some are repeated."""

    def share(self, layer: MixtureOfExperts, chosen: Tensor, samples: int) -> BatchShare:
        """Return the share of the batch that a micro-batch's tokens are, and count their rows."""
        m = self._record.place()[1]
        given = self._microbatches[m]
        share = _Share(self, layer, chosen, given.weight / self._parts_by_tp)
        self._rows.setdefault(layer, {})[m] = share.own_rows
        return share

    def end_step(self) -> None:
        """Sum the rows of all ranks, by which biases move before the next step."""
        if self._moved:
            sizes = [layer.experts_in_all for layer in self._moved]
            own = torch.cat([self._sum_own(layer) for layer in self._moved])
            for layer, rows in zip(self._moved, self._group.all_reduce(own).split(sizes), strict=True):
                layer.keep_rows(rows)

    # ---- the whole batch ----------------------------------------------------------------------------------

    def rows_of(self, layer: MixtureOfExperts) -> Tensor:
        """Return the rows of each expert in the whole batch, once all forwards of the layer are done."""
        if layer not in self._summed:
            self._summed[layer] = self._group.all_reduce(self._sum_own(layer))
        return self._summed[layer]

    def _sum_own(self, layer: MixtureOfExperts) -> Tensor:
        none = torch.zeros(layer.experts_in_all, dtype=torch.long, device=self._device)
        return sum(self._rows.get(layer, {}).values(), none)


class _Share(BatchShare):
    """A micro-batch's tokens on one rank.

    Args:
        routing: the rank's.
        layer: whose forward it is.
        chosen: each token's experts, [T, k].
        weight: the share of the batch's tokens; 0 for a stand-in.
    """

    def __init__(
        self,
        routing: BatchRouting,
        layer: MixtureOfExperts,
        chosen: Tensor,
        weight: float,
    ) -> None:
        super().__init__(chosen, layer.experts_in_all)
        self._routing, self._layer = routing, layer
        self.choices = round(chosen.numel() / weight) if weight else 0
        self.scale = routing.loss_scale * weight / max(1, len(chosen))
        self.own_rows = super().rows() * int(weight > 0)

    def rows(self) -> Tensor:
        """Return the rows of each expert in the whole batch, (E,)."""
        return self._routing.rows_of(self._layer)

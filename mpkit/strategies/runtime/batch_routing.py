"""Routing that depends on the whole batch, of which a rank has a share: micro-batches, samples, parts of sequences.

    bias             at the end of a step, the rows of all ranks and micro-batches are summed; the bias moves by them
    auxiliary loss   f is summed at the first backward of a layer in a step, by when all its forwards are done
    capacity         in a forward, ranks gather how many rows each stretch of their tokens sends to each expert, which
                     numbers every row in the order of the batch, after those of the micro-batches before

A stretch is some consecutive tokens of one sample. Replica r of n has the samples r, r + n, ... of a micro-batch, and
ranks that share sequences have pieces of each (`mpkit.strategies.context.sequence`).

`mpkit.strategies.models.experts.routing` says what this is of the whole batch. A forward that is repeated counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpkit.errors import MpkitError
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.context.sequence import pieces
from mpkit.strategies.experts.known_experts import find_balanced
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.experts import MixtureOfExperts
from mpkit.strategies.models.experts.routing import BatchShare, WholeBatch, number_rows
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
        self._placed: dict[tuple[MixtureOfExperts, int], Tensor] = {}
        self._gathered: dict[tuple[MixtureOfExperts, int], Tensor] = {}
        if not self._layers:
            return
        for layer in self._layers.values():
            layer.batch = self
        plan = job.plan
        t = plan.tp if plan.sequence_parallel else 1
        self._group = axes.communicator_of("dp", "cp", *(("tp",) if t > 1 else ()))
        self._parts_by_tp, self._n = t, plan.dp
        places = [plan.mesh.place(rank) for rank in self._group.ranks]
        # The numbers of the stretches of a sample that each rank has, in order.
        stretches = []
        for place in places:
            of_cp = pieces(place.cp, plan.cp, plan.cp_order)
            all_of_cp = [piece * t + i for piece in of_cp for i in range(t)]
            k = len(of_cp)
            stretches.append(all_of_cp[place.tp * k : (place.tp + 1) * k] if t > 1 else all_of_cp)
        self._stretches, self._replica = torch.tensor(stretches), torch.tensor([place.dp for place in places])

    # ---- the step -----------------------------------------------------------------------------------------

    def begin_step(self, microbatches: Sequence[MicroBatch], loss_scale: float) -> None:
        """Move biases; note the micro-batches of the next step, and the factor of its gradients."""
        self._microbatches, self.loss_scale = list(microbatches), loss_scale
        for kept in (self._rows, self._summed, self._placed, self._gathered):
            kept.clear()
        for layer in self._moved:
            layer.move_bias()

    def begin(self, layer: MixtureOfExperts) -> None:
        """Leave the bias as it is: a step has several forwards, and some are repeated."""

    def share(self, layer: MixtureOfExperts, chosen: Tensor, samples: int) -> BatchShare:
        """Return the share of the batch that a micro-batch's tokens are, and count their rows."""
        m = self._record.place()[1]
        given = self._microbatches[m]
        mine = -(-(given.samples - self._axes.place.dp) // self._n)
        if layer.capacity is not None and given.weight and samples != mine:
            raise MpkitError(
                f"experts with capacity={layer.capacity} take the first rows of the batch, and the layer's input "
                f"has {samples} in its first dimension, which are not the {mine} samples of this micro-batch: it has "
                "to be [batch, ..., width]"
            )
        share = _Share(self, layer, m, chosen, samples, given.weight / self._parts_by_tp)
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

    def places_of(self, layer: MixtureOfExperts, m: int, share: _Share) -> Tensor:
        """Return the numbers of a micro-batch's rows in the order of the whole batch."""
        if (layer, m) not in self._placed:
            self._placed[layer, m] = self._number_in_batch(layer, m, share)
        return self._placed[layer, m]

    def _number_in_batch(self, layer: MixtureOfExperts, m: int, share: _Share) -> Tensor:
        E, here, device = share.E, self._group.index, share.chosen.device
        S = self._stretches.shape[1]  # per sample
        # ---- own
        by_stretch = share.chosen.reshape(share.samples * S, -1)
        own = (by_stretch[..., None] == torch.arange(E, device=device)).sum(1) * share.counts
        # ---- gather
        most = -(-self._microbatches[m].samples // self._n) * S
        padded = own.new_zeros(most, E)
        padded[: len(own)] = own[:most]
        everyone = self._group.all_gather(padded)
        # ---- order
        sample = torch.arange(most // S) * self._n + self._replica[:, None]  # [ranks, samples]
        key = sample[..., None] * self._stretches.numel() + self._stretches[:, None]  # [ranks, samples, S]
        order = key.flatten().argsort().to(device)
        before = everyone[order].cumsum(0) - everyone[order]
        before = torch.zeros_like(before).index_copy(0, order, before).view(-1, most, E)[here, : len(own)]
        # ---- number
        before = before + self._rows_before(layer, m) - (own.cumsum(0) - own)
        self._gathered[layer, m] = everyone.sum(0)
        number = number_rows(share.chosen, E).reshape(len(own), -1)
        return (number + before.gather(1, by_stretch)).view_as(share.chosen)

    def _rows_before(self, layer: MixtureOfExperts, m: int) -> Tensor | int:
        """Return the rows of all ranks in the micro-batches before."""
        return sum(rows for (each, i), rows in self._gathered.items() if each is layer and i < m)


class _Share(BatchShare):
    """A micro-batch's tokens on one rank.

    Args:
        routing: the rank's.
        layer: whose forward it is.
        m: the micro-batch.
        chosen: each token's experts, [T, k], sample by sample.
        samples: the number of samples.
        weight: the share of the batch's tokens; 0 for a stand-in.
    """

    def __init__(
        self,
        routing: BatchRouting,
        layer: MixtureOfExperts,
        m: int,
        chosen: Tensor,
        samples: int,
        weight: float,
    ) -> None:
        super().__init__(chosen, layer.experts_in_all)
        self._routing, self._layer, self._m = routing, layer, m
        self.samples, self.counts = samples, int(weight > 0)
        self.choices = round(chosen.numel() / weight) if weight else 0
        self.scale = routing.loss_scale * weight / max(1, len(chosen))
        self.own_rows = super().rows() * self.counts

    def rows(self) -> Tensor:
        """Return the rows of each expert in the whole batch, (E,)."""
        return self._routing.rows_of(self._layer)

    def places(self) -> Tensor:
        """Return each choice's number among those of its expert in the whole batch, [T, k]."""
        return self._routing.places_of(self._layer, self._m, self)

"""The experts that this rank's tokens choose in a training step: their load, and routing that needs the whole batch.

`ExpertRows` counts choices for `Run.expert_load`, before a layer's experts compute, and once even if the forward is
recomputed. Of tp ranks, which see the same tokens unless they divide the sequence, only the first one counts these.
`BatchRouting` is for a rank's share of a batch: micro-batches, samples, parts of sequences.

    bias             at the end of a step, the rows of all ranks and micro-batches are summed; the bias moves by them
    auxiliary loss   f is summed at the first backward of a layer in a step, when all its forwards are done

`mpkit.strategies.models.experts` has the formulas for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.experts.divide import chosen_experts, find_balanced, find_experts, number_of_experts
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.experts import BatchShare, MixtureOfExperts, WholeBatch
from mpkit.strategies.stage.stage import Stage
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


class ExpertRows:
    """One rank's counts."""

    def __init__(self, context: Context, job: TrainJob, axes: MeshAxes) -> None:
        self._record, self._microbatches = context.record, list[MicroBatch]()
        self._counts: dict[str, Tensor] = {}
        plan = job.plan
        for name, module in find_experts(job.what.model).items():
            # Where tp divides experts too, before tokens of other ranks are gathered.
            if not axes.leads(but="tp" if plan.sequence_parallel else ""):
                continue
            experts = number_of_experts(module) * plan.ep
            self._counts[name] = torch.zeros(experts, dtype=torch.long, device=context.device)
            module.register_forward_pre_hook(partial(self._choose, name), with_kwargs=True, prepend=True)

    def begin(self, microbatches: Sequence[MicroBatch]) -> None:
        """Note the micro-batches of the next step."""
        self._microbatches = list(microbatches)
        for counts in self._counts.values():
            counts.zero_()

    def _choose(self, name: str, _experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _stage, m, step = self._record.place()
        chosen, counts = chosen_experts(args, kwargs), self._counts[name]
        trains = torch.is_grad_enabled() and step >= 0 and not self._record.is_inside(Kind.RECOMPUTE)
        weight = self._microbatches[m].weight if 0 <= m < len(self._microbatches) else 1.0
        if trains and weight and type(chosen) is Tensor:
            counts += chosen.flatten().bincount(minlength=len(counts))

    def end(self, step: int) -> None:
        """Record the counts of a step."""
        for name, counts in self._counts.items():
            for expert, count in enumerate(counts.tolist()):
                self._record.values.count_rows(f"{name}[{expert}", count, step)


class BatchRouting(WholeBatch):
    """The layers with balanced routing of one rank, step after step."""

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

    def begin_step(self, microbatches: Sequence[MicroBatch], loss_scale: float) -> None:
        """Move biases; note the micro-batches of the next step, and the factor of its gradients."""
        self._microbatches, self.loss_scale = list(microbatches), loss_scale
        for kept in (self._rows, self._summed):
            kept.clear()
        for layer in self._moved:
            layer.move_bias()

    def begin(self, layer: MixtureOfExperts) -> None:
        """Leave the bias alone: a step has several forwards, and some are repeated."""

    def share(self, layer: MixtureOfExperts, chosen: Tensor, samples: int) -> BatchShare:
        """Return a micro-batch's tokens as a share of the batch, and count their rows."""
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

    def rows_of(self, layer: MixtureOfExperts) -> Tensor:
        """Return the rows of each expert in the whole batch, once all forwards of the layer are done."""
        if layer not in self._summed:
            self._summed[layer] = self._group.all_reduce(self._sum_own(layer))
        return self._summed[layer]

    def _sum_own(self, layer: MixtureOfExperts) -> Tensor:
        none = torch.zeros(layer.experts_in_all, dtype=torch.long, device=self._device)
        return sum(self._rows.get(layer, {}).values(), none)


class _Share(BatchShare):
    """A micro-batch's tokens on one rank."""

    def __init__(self, routing: BatchRouting, layer: MixtureOfExperts, chosen: Tensor, weight: float) -> None:
        super().__init__(chosen, layer.experts_in_all)
        self._routing, self._layer = routing, layer
        self.scale = routing.loss_scale * weight / max(1, len(chosen))
        self.own_rows = super().rows() * int(weight > 0)

    def rows(self) -> Tensor:
        """Return the rows of each expert in the whole batch, (E,)."""
        return self._routing.rows_of(self._layer)

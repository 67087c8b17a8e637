"""Which experts this rank's tokens choose in a training step, counted and recorded for `Run.expert_load`.

    begin    the step's micro-batches, of which stand-ins do not count
    choose   before a layer's experts compute: count each token's choices; once, even if the forward is recomputed
    end      record the step's counts

Ranks that share layers (tp) see the same tokens, unless they
divide the sequence; then only the first of them counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.experts.known_experts import chosen_experts, find_experts, number_of_experts
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.trace import Kind
from mpkit.trace.expert_load import DROPPED

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["ExpertRows"]


class ExpertRows:
    """One rank's counts.

    Args:
        context: this rank's context.
        job: read for the model, of which this rank's layers have weights, and the plan.
        axes: the mesh's axes.
    """

    def __init__(self, context: Context, job: TrainJob, axes: MeshAxes) -> None:
        self._record, self._microbatches = context.record, list[MicroBatch]()
        self._counts: dict[str, Tensor] = {}
        plan = job.plan
        for name, module in find_experts(job.what.model).items():
            # Where tp divides experts too, before tokens of other ranks are gathered.
            if not axes.leads(but="tp" if plan.sequence_parallel else ""):
                continue
            experts = number_of_experts(module) * plan.ep
            self._counts[name] = torch.zeros(experts + 1, dtype=torch.long, device=context.device)
            module.register_forward_pre_hook(partial(self._choose, name), with_kwargs=True, prepend=True)

    def begin(self, microbatches: Sequence[MicroBatch]) -> None:
        """Note the micro-batches of the next step."""
        self._microbatches = list(microbatches)
        for counts in self._counts.values():
            counts.zero_()

    def _choose(self, name: str, _experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _stage, m, step = self._record.place()
        chosen, counts = chosen_experts(args, kwargs), self._counts[name]
        again = self._record.is_inside(Kind.RECOMPUTE)
        if (
            again
            or not torch.is_grad_enabled()
            or step < 0
            or not self._weight_of(m)
            or type(chosen) is not Tensor
        ):
            return
        counts += chosen.flatten().bincount(minlength=len(counts))  # choices that are dropped are the last

    def _weight_of(self, m: int) -> float:
        return self._microbatches[m].weight if 0 <= m < len(self._microbatches) else 1.0

    def end(self, step: int) -> None:
        """Record the counts of a step."""
        for name, counts in self._counts.items():
            *rows, dropped = counts.tolist()
            for expert, count in (*enumerate(rows), *([(DROPPED, dropped)] if dropped else ())):
                self._record.values.count_rows(f"{name}[{expert}", count, step)

"""Evaluation of the model in between steps, under the plan that trains it.

    quiet       remember random states and training modes; switch to evaluation, without gradients
    forwards    each batch, split and divided as in training (`Pipeline.scores`); under DP rank 0 computes it by itself
    sum         over all ranks: each adds the scores of its samples once
    restore     random states and modes, so that training goes on as if nothing had happened

What is measured are means over the samples of all batches, whatever the batches' sizes are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.job.feed import Feed
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.runtime.pipeline import Pipeline
from mpkit.strategies.stage.gradient_sync import GradientSync

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["Evaluation"]


class Evaluation:
    """One rank's part of evaluations.

    Args:
        context: this rank's context.
        job: the training.
        axes: the mesh's axes.
        sync: this rank's stages.
    """

    def __init__(self, context: Context, job: TrainJob, axes: MeshAxes, sync: GradientSync) -> None:
        assert job.how.evaluation is not None
        self._context, self._sync, self._names = context, sync, job.how.evaluation.names
        job = job.for_evaluation()
        self._computes, self._counts = True, axes.leads()  # the others compute the same scores
        if job.plan.data_parallel == "dp":
            self._computes = context.rank == 0
            job = replace(job, where=replace(job.where, plan=replace(job.plan, dp=1, data_parallel="ddp")))
        self._job = job
        if self._computes:
            self._pipeline = Pipeline(context, job, axes, sync, evaluates=True)

    def run(self) -> dict[str, float]:
        """Evaluate the model as it is now, and return what was measured, by name; every rank calls it."""
        # ---- quiet
        with self._quiet(), torch.no_grad(), self._sync.evaluation_mode():
            # ---- forwards
            sums = torch.zeros(2 * len(self._names), dtype=torch.float64, device=self._context.device)
            if self._computes:
                feed = Feed(self._context, self._job, needed=self._pipeline.takes_data, accounts=False)
                for number in range(len(self._job.what.batches)):
                    added = self._pipeline.scores(number, feed.take(number))
                    if added is not None and self._counts:
                        sums += added
                feed.close()
        # ---- sum
        total, weight = self._context.comm.all_reduce(sums).view(-1, 2).unbind(1)
        values: list[float] = (total / weight).tolist()
        return dict(zip(self._names, values, strict=True))

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        modules = [m for stage in self._sync.stages.values() for m in stage.layers.modules()]
        training = [module.training for module in modules]
        python, numpy = random.getstate(), np.random.get_state()
        device = self._context.device
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                for module in modules:
                    module.training = False
                yield
        finally:
            # ---- restore
            random.setstate(python)
            np.random.set_state(numpy)
            for module, was in zip(modules, training, strict=True):
                module.training = was

"""Evaluation of the model in between steps, under the plan that trains it.

    quiet       remember random states and training modes; switch to evaluation, without gradients
    forwards    each batch, split and divided as in training: of each rank's row, F, SEND_F and RECV_F in the order of
                the schedule, which is an order in which every input is there before it is needed (`ForwardPass`)
    sum         over all ranks: each adds the scores of its samples once
    restore     random states and modes, so that training goes on as if nothing had happened

What is measured are means over the samples of all batches, whatever the batches' sizes are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.job.feed import Feed
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.nn_dataparallel.dp import DP
from mpkit.strategies.nn_dataparallel.evaluation import ScoredShares
from mpkit.strategies.nn_dataparallel.scatter_feed import ScatterFeed
from mpkit.strategies.stage.gradient_sync import GradientSync

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context
from functools import partial

from torch import Tensor

from mpkit.strategies.compute.scores import ScoredForward, ScoredPartForward
from mpkit.strategies.compute.stage_forward import StageForward
from mpkit.strategies.compute.stage_work import StageRecord
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.runtime.local_model import attention_over
from mpkit.strategies.runtime.pipeline import Pipeline, sum_of
from mpkit.strategies.stage.stage import Stage
from mpkit.trace import Kind

__all__ = ["Evaluation", "ForwardPass"]


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
        self._job = job.for_evaluation()
        self._is_dp = isinstance(sync, DP)
        self._forwards: ScoredShares | ForwardPass = (
            ScoredShares(context, self._job, sync)
            if isinstance(sync, DP)
            else ForwardPass(context, self._job, axes, sync)
        )
        self._counts = axes.leads()  # the others compute the same scores

    def run(self) -> dict[str, float]:
        """Evaluate the model as it is now, and return what was measured, by name; every rank calls it."""
        # ---- quiet
        with self._quiet(), torch.no_grad(), self._sync.evaluation_mode():
            # ---- forwards
            sums = torch.zeros(2 * len(self._names), dtype=torch.float64, device=self._context.device)
            feed = self._feed()
            for number in range(len(self._job.what.batches)):
                microbatches = feed.take(number)
                added = self._forwards.scores(number, microbatches)
                if added is not None and self._counts:
                    sums += added
            feed.close()
        # ---- sum
        total, weight = self._context.comm.all_reduce(sums).view(-1, 2).unbind(1)
        values: list[float] = (total / weight).tolist()
        return dict(zip(self._names, values, strict=True))

    def _feed(self) -> Feed:
        if isinstance(self._forwards, ForwardPass):
            needed = self._forwards.takes_data
            return Feed(self._context, self._job, needed=needed, accounts=False)
        return ScatterFeed(self._context, self._job, accounts=False)

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
            random.setstate(python)
            np.random.set_state(numpy)
            # ---- restore
            for module, was in zip(modules, training, strict=True):
                module.training = was


class ForwardWork:
    """One stage's forwards, recorded.

    Args:
        context: this rank's context.
        job: the job on the data for evaluation.
        stage: the stage's layers.
        compute: what its forward computes.
    """

    def __init__(self, context: Context, job: TrainJob, stage: Stage, compute: StageForward) -> None:
        self._record, self._compute = StageRecord(context.record, job, stage, compute.flops), compute
        self._microbatches: list[MicroBatch] = []

    def begin_step(self, number: int, microbatches: list[MicroBatch], _loss_scale: float) -> None:
        """Set the batch and its micro-batches."""
        self._compute.begin_step(number, microbatches)
        self._microbatches = microbatches

    def forward(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """Return what the stage's forward computes from its inputs."""
        op = self._record.begin(Kind.FORWARD, m, self._microbatches[m].key)
        outputs = self._compute(m, inputs)
        self._record.track(outputs)
        self._record.end(op)
        return outputs


class ForwardPass(Pipeline):
    """One rank's forwards of an evaluation.

    Args:
        context: this rank's context.
        job: the job on the data for evaluation.
        axes: the mesh's axes.
        sync: this rank's stages.
    """

    def __init__(self, context: Context, job: TrainJob, axes: MeshAxes, sync: GradientSync) -> None:
        super().__init__(context, job, axes, sync)
        self._row = tuple(action for action in self._row if action.kind in ("F", "SEND_F", "RECV_F"))
        forward_of = ScoredForward if job.where.partition is None else ScoredPartForward
        over = partial(attention_over, job.plan, axes.communicator_of)
        self._forwards = {
            s: forward_of(context, job, stage, over(stage.sharded.draws)) for s, stage in sync.stages.items()
        }
        self._only = {
            s: ForwardWork(context, job, stage, self._forwards[s]) for s, stage in sync.stages.items()
        }
        self._work = self._only  # type: ignore[assignment]  # no backward is called
        self._broadcasts_early = False
        self._device = context.device

    def scores(self, number: int, microbatches: list[MicroBatch]) -> Tensor | None:
        """Return the sums and weights of a batch's scores on ranks with the last stage; None on the others.

        Args:
            number: the number of the batch.
            microbatches: this rank's share of it.
        """
        self._microbatches = microbatches
        for work in self._only.values():
            work.begin_step(number, microbatches, 1.0)
        # ---- execute
        for action in self._row:
            if action.microbatch >= len(microbatches):
                continue  # a small batch has fewer than the schedule
            if action.kind == "F":
                self._forward(action)
            else:
                self._communicate(action)
        # ---- drain
        self._messages.drain()
        added = sum_of(self._loss) if self.computes_loss else None
        self._loss.clear()
        return None if added is None else torch.as_tensor(added, dtype=torch.float64, device=self._device)

"""The pipeline of an evaluation: the forwards of the plan's schedule and the messages between them, and nothing else.

Of each rank's row, what is left are F, SEND_F and RECV_F, in the order of the schedule, which is an order in which
every input is there before it is needed. Nothing is kept for a backward.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.compute.scores import ScoredForward, ScoredPartForward
from mpkit.strategies.compute.stage_forward import StageForward
from mpkit.strategies.compute.stage_record import StageRecord
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.runtime.local_model import attention_over
from mpkit.strategies.runtime.pipeline import Pipeline, sum_of
from mpkit.strategies.stage.gradient_sync import GradientSync
from mpkit.strategies.stage.stage import Stage
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["ForwardPass"]


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
        over = partial(attention_over, job.plan, axes.communicator_of("cp"))
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

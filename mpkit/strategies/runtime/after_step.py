"""Between two steps on a rank: an evaluation if one is due, and the user's `on_step`.

evaluate    `evaluate=` of `Cluster.train`; rank 0 logs the scores
on_step     the user's function, with a `StepContext`
agree       if any rank asked to stop, all ranks stop after this step
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpkit.strategies.comm.call_checks import CallChecks
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.job.feed import Feed
from mpkit.strategies.job.job import TrainJob, due
from mpkit.strategies.models.randomness import preserve_random_state
from mpkit.strategies.rank_context import Context
from mpkit.strategies.runtime.pipeline import Pipeline
from mpkit.strategies.stage.gradient_sync import GradientSync

if TYPE_CHECKING:
    from mpkit.strategies.runtime.train import Training


class Evaluation:
    """One rank's part of evaluations."""

    def __init__(self, context: Context, job: TrainJob, axes: MeshAxes, sync: GradientSync) -> None:
        assert job.how.evaluation is not None
        self._context, self._sync, self._names = context, sync, job.how.evaluation.names
        job = job.for_evaluation()
        self._computes, self._counts = True, axes.leads()  # ranks that do not lead compute the same scores
        if job.plan.data_parallel == "dp":
            self._computes = context.rank == 0
            job = replace(job, where=replace(job.where, plan=replace(job.plan, dp=1, data_parallel="ddp")))
        self._job = job
        if self._computes:
            self._pipeline = Pipeline(context, job, axes, sync, evaluates=True)

    def run(self) -> dict[str, float]:
        """Evaluate the model as it is now, and return the scores by name; every rank calls it."""
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
        try:
            with preserve_random_state(self._context.device):
                for module in modules:
                    module.training = False
                yield
        finally:
            for module, was in zip(modules, training, strict=True):
                module.training = was


@dataclass(frozen=True)
class StepContext(Context):
    """The first argument of `on_step`: a rank's context, right after a step.

    Attributes:
        loss: the loss of the step over the whole batch; the same on every rank.
        evaluation: what the evaluation after this step measured, by name, such as {"eval loss": 2.3}; None if there was
            none after this step. The same on every rank.
        weights: the elements of parameters that this rank updates, by the parameter's name; flattened under ZeRO, only
            this rank's stages in a pipeline, and shards under tensor parallelism. In fp32 where the optimizer works on
            fp32 copies. To be read: a change would be unknown to the other ranks.
        state: what `on_step` wants to keep from step to step, and in checkpoints: values of JSON types. A training that
            resumes on as many ranks finds it on each rank as it was; on another number, rank 0's everywhere.
    """

    loss: float = float("nan")
    evaluation: dict[str, float] | None = None
    weights: dict[str, Tensor] = field(default_factory=dict, repr=False)
    state: dict[str, Any] = field(default_factory=dict)
    _step: int = 0
    _reasons: list[str] = field(default_factory=list, repr=False)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log a number for this step: `ctx.log("accuracy", 0.5)`; see `Context.log`."""
        self.record.log(name, value, self._step if step is None else step)

    def stop(self, reason: str = "") -> None:
        """End the training after this step, on all ranks; `on_step` may also return True.

        Args:
            reason: what `run` says about it.
        """
        self._reasons.append(str(reason) or "on_step called ctx.stop()")


class AfterStep:
    """One rank's part in what happens after each step; `checks` compares what `on_step` communicates."""

    def __init__(
        self, context: Context, job: TrainJob, axes: MeshAxes, training: Training, checks: CallChecks | None = None
    ) -> None:  # fmt: skip
        self._checks = checks
        self._context, self._job, self._training = context, job, training
        self.state: dict[str, Any] = {}  # the user's; see `StepContext`
        self._evaluation: Evaluation | None = None
        if job.how.evaluation is not None:
            self._evaluation = Evaluation(context, job, axes, training.sync)

    def __call__(self, step: int) -> bool:
        """Do what is due after a step, and return whether training ends here; every rank calls it."""
        # ---- evaluate
        measured = None
        if self._evaluation is not None and due(self._job.how.evaluation, step, self._job.how.steps):
            measured = self._evaluation.run()
            for name, value in measured.items() if self._context.rank == 0 else ():
                self._context.record.log(name, value, step)
        # ---- on_step
        on_step = self._job.how.on_step
        if on_step is None:
            return False
        context = self._step_context(step, measured)
        wire = context.comm.wire
        wire.checks = self._checks
        try:
            returned = on_step(context, step)
        finally:
            wire.checks = None
        if _asks_to_stop(returned):
            context._reasons.append("on_step returned True")
        for reason in context._reasons[:1]:
            self._context.record.values.stop(reason, step)
        # ---- agree
        asked = torch.tensor([float(bool(context._reasons))], device=self._context.device)
        return bool(self._context.comm.all_reduce(asked, op="max").item())

    def _step_context(self, step: int, measured: dict[str, float] | None) -> StepContext:
        context, training = self._context, self._training
        loss = torch.tensor([training.loss or 0.0], dtype=torch.float64, device=context.device)
        weights = {
            piece.name: training.update.masters.master_of(piece).detach()
            for piece in training.sync.pieces
            if piece.start < piece.end
        }
        return StepContext(
            context.rank, context.world_size, context.device, context.comm, context.record,
            training.batch_group.all_reduce(loss).item(), measured, weights, self.state, step,
        )  # fmt: skip


def _asks_to_stop(returned: Any) -> bool:
    if returned is None or isinstance(returned, bool):
        return bool(returned)
    if getattr(returned, "dtype", None) in (torch.bool, bool):  # one element, of torch or numpy
        return bool(returned)
    raise ValueError(
        f"on_step returned {returned!r:.80}: True ends the training after this step, None or False lets it go on; "
        'ctx.log("name", value) is for values'
    )

"""Training on one rank: its part of the model, step after step.

place     keep the rank's own layers, on its device and in the plan's precision, and drop the rest
step      take this rank's share of the batch (`feed`), compute its gradients (`pipeline`), complete them over all
          replicas (`sync`), then `update`
after     evaluate, call the user's `on_step`, which may end the training (`after_step`), and save a checkpoint
gather    return the rank's weights on the CPU
"""

from __future__ import annotations

from contextlib import nullcontext
from math import isfinite, isnan
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.strategies.comm.call_checks import CallChecks
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.experts.divide import find_experts
from mpkit.strategies.job.feed import Feed
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.loss.counted import MeanLoss, move_loss
from mpkit.strategies.loss.whole_batch import WholeBatchLoss
from mpkit.strategies.models.chain import layers_of, prefix_of, repeated_blocks
from mpkit.strategies.models.hooks import register
from mpkit.strategies.models.own_draws import spans_at
from mpkit.strategies.models.randomness import seed_all
from mpkit.strategies.nn_dataparallel.dp import DP, ScatterFeed
from mpkit.strategies.program_calls.communication import compare_calls
from mpkit.strategies.replicas.batchnorm import announce_sync, over_whole_batch
from mpkit.strategies.replicas.ddp import DDP
from mpkit.strategies.replicas.part import ReplicatedPart, holders_of
from mpkit.strategies.replicas.tied import TiedWeights, tied_parameters
from mpkit.strategies.replicas.zero import zero_sync
from mpkit.strategies.runtime.after_step import AfterStep
from mpkit.strategies.runtime.checkpoints import Checkpoints
from mpkit.strategies.runtime.evidence import RankEvidence
from mpkit.strategies.runtime.experts import BatchRouting, ExpertRows
from mpkit.strategies.runtime.local_model import localize
from mpkit.strategies.runtime.pipeline import Pipeline
from mpkit.strategies.runtime.rank_state import TrainedState, trained_state
from mpkit.strategies.stage.gradient_sync import GradientSync, named_parameters
from mpkit.strategies.stage.partitioned_stage import place_parts
from mpkit.strategies.stage.recompute import RecomputedBlock, recompute_blocks
from mpkit.strategies.stage.stage import PRECISIONS, Stage
from mpkit.strategies.update.optimizer import free, trained_parameters
from mpkit.strategies.update.update import Update, narrow
from mpkit.trace.record.hooks import watch

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


def train(context: Context, job: TrainJob) -> TrainedState:
    """Run this rank's part of a training; `Cluster.train` calls this on every rank.

    mpkit compares between ranks what the user's functions communicate between steps, and under ZeRO-3 the layers whose
    parts ranks send, since samples may decide which ones a model calls; not the strategies' other calls.
    """
    if job.plan.zero == 3:
        context.comm.wire.checks_of_layers = CallChecks(context.record.folder, context.rank)
    looks = job.how.on_step is not None or job.how.evaluation is not None
    checks = CallChecks(context.record.folder, context.rank) if looks else None
    with nullcontext() if checks is None else compare_calls(context.comm, checks):
        training = Training(context, job, checks)
        for step in range(job.how.first_step, job.how.steps):
            training.step(step)
            stops = training.after(step)
            training.checkpoints.save_if_due(step)
            if stops:
                break
        training.evidence.finish()
        training.feed.close()
        return trained_state(training, averaged=job.how.ema is not None)


class Training:
    """One rank's part of a training."""

    def __init__(self, context: Context, job: TrainJob, checks: CallChecks | None = None) -> None:
        seed_all(job.how.seed + context.rank, context.device)
        self._record, self._device, self._rank = context.record, context.device, context.rank
        # ---- place
        axes = self.axes = MeshAxes(context.comm, context.device, job.where.mesh)
        job = job.for_place(axes.place.tp)
        if isinstance(job.what.loss, WholeBatchLoss) and job.plan.data_parallel != "dp":
            job = job.with_loss(job.what.loss.bind_group(axes.communicator_of("dp")))
        move_loss(job.what.loss, context.device)
        self._job = job
        trained = trained_parameters(job.what.model, here=True)
        self.first_names = trained[1]
        stages, self.rest = place_stages(context, job, axes)
        expert_rows = ExpertRows(context, job, axes)
        self._routing = BatchRouting(context, job, axes, stages)
        free(trained[0], {p for _, p in named_parameters(stages).items()})
        # DP counts the whole batch on rank 0; otherwise each replica counts its share.
        self.batch_group = axes.communicator_of(*(() if job.plan.data_parallel == "dp" else ("dp", "cp")))
        fp32_params = narrow(job.plan, nn.ModuleList(stage.layers for stage in stages.values()))
        register(job.what.parameter_hooks, {trained[1][n]: p for n, p in named_parameters(stages).items()})
        self.sync, self.tied, self.pipeline, self.feed = assemble(context, job, axes, stages)
        self.update = Update(context, job, axes, self.sync, self.tied, fp32_params, trained)
        watch_stages(context, job, stages)
        self._warned = False
        self.loss: float | None = None  # of the latest step, or this replica's share of it
        self.after = AfterStep(context, job, axes, self, checks)
        self.checkpoints = Checkpoints(context, job, axes, self)
        self.evidence = RankEvidence(context, job, self)
        self._expert_rows = expert_rows
        self._varies = bool(find_experts(job.what.model))  # by the tokens that choose an expert

    def step(self, number: int) -> None:
        """Run one training step on its batch."""
        self.evidence.begin(number)
        with self._record.step(number):
            batch = self.feed.take(number)
            shapes = tuple((each.key, each.samples, each.weight > 0) for each in batch)
            self._record.begin_memory(shapes, varies=self._varies)
            self._expert_rows.begin(batch)
            self.pipeline.loss_scale = self.update.scaler.scale
            self._routing.begin_step(batch, self.update.scaler.scale)
            self.sync.begin_step()
            returned = self.pipeline.step(number, batch)
            self.sync.finish()
            self._routing.end_step()
            self.tied.sum_gradients()
            self.loss, factor = self._loss_and_factor(returned)
            if (loss := self.loss) is not None:
                self._record.loss(loss)
                if not self._warned and self.pipeline.computes_loss:
                    self._warned = _warn_if_not_finite(number, loss)
            scale, skipped = self.update.scaler.scale, self.update.skipped
            self.update.step(number, factor, self.evidence.gradients)
            self._expert_rows.end(number)
            if self._job.plan.cp > 1 and isinstance(self.pipeline, Pipeline):
                self._record.values.count_attended(self.pipeline.attended_pairs, number)
        if self.update.skipped == 1 > skipped and self._rank == 0:
            print(
                f"step {number}: gradients overflowed under the loss scale {scale:.0f}, so this update is left out and "
                "the scale halved; the same may happen in later steps without this line."
            )
        self.evidence.end(number, scale, skipped=self.update.skipped > skipped)

    def _loss_and_factor(self, returned: list[float]) -> tuple[float | None, float | None]:
        """Return the loss, or this replica's share, if it is known here; and the factor that the gradients still need.

        The pipeline `returned` nothing, [loss], or [total / nominal, count].
        """
        if self._job.what.nominal is None or not returned:
            return (returned[0] if returned else None), None
        total, count = torch.tensor(returned, dtype=torch.float64, device=self._device).split(1)
        count = self.batch_group.all_reduce(count.clone())
        factor = self._job.what.nominal / count
        loss = (total * factor).item()
        # The mean of nothing is NaN, and the gradients of torch's losses are then 0.
        empty = isinstance(self._job.what.loss, MeanLoss) and count.item() == 0
        return loss, 1.0 if empty else factor.item()


def assemble(
    context: Context, job: TrainJob, axes: MeshAxes, stages: dict[int, Stage]
) -> tuple[GradientSync, TiedWeights, Pipeline | DP, Feed]:
    """Return the parts of a step: gradient synchronization, tied weights, the pipeline, and the feed."""
    plan, replicas = job.plan, axes.communicator_of("dp", "cp")
    rank_of = [axes.communicator_of("pp").ranks[place] for place in job.where.schedule.stage_to_rank]
    tied = tied_parameters(stages, job.where.shared)
    if replicas.size > 1 and plan.data_parallel == "dp":
        dp = DP(context, job, stages)  # runs the whole step, not only the synchronization
        return dp, TiedWeights(context, job.where.shared, rank_of, dp), dp, ScatterFeed(context, job)
    holders, experts = holders_of(plan, axes)
    held = ReplicatedPart(context, plan, stages, holders, tied, experts=experts, by_owner=job.how.by_owner)
    if plan.zero:
        sync: GradientSync = zero_sync(held)
    elif replicas.size > 1 or (held.experts is not None and held.experts.replicas.size > 1):
        sync = DDP(held)
    else:
        sync = GradientSync(stages)
    pipeline = Pipeline(context, job, axes, sync)
    feed = Feed(context, job, needed=pipeline.takes_data)
    return sync, TiedWeights(context, job.where.shared, rank_of, sync), pipeline, feed


def place_stages(
    context: Context, job: TrainJob, axes: MeshAxes
) -> tuple[dict[int, Stage], dict[str, Tensor]]:
    """Return this rank's stages by number, and the part of the model's state that belongs to no layer."""
    model, partition = job.what.model, job.where.partition
    sharded = localize(model, job.plan, job.where.schedule, axes.communicator_of)
    if job.plan.dp > 1 and job.plan.batchnorm == "sync":
        replicas = axes.communicator_of("dp")
        announce_sync(context, replicas, model)
        over_whole_batch(model, replicas)
    numbers = job.where.schedule.stages_of(axes.place.pp)
    recomputed = recompute_blocks(model, job.plan.recompute, partition)
    if partition is not None:
        dtype = PRECISIONS.get(job.plan.precision)
        parts, rest = place_parts(model, partition, numbers, context.device, dtype, sharded)
        _hold(recomputed, parts)
        return parts, rest
    layers, blocks = layers_of(model), repeated_blocks(model).values()
    names = tuple(prefix_of(name) for name, _ in layers)
    rest = {key: value for key, value in model.state_dict().items() if not key.startswith(names)}
    spans = spans_at([(name, True) for name, _ in layers], sharded.draws.spans)
    stages = {}
    for number in numbers:
        held = job.where.stages[number]
        in_place = any(of_layers[i].in_place for of_layers in job.where.numbers.values() for i in held)
        stages[number] = Stage(
            number, [layers[i] for i in held], context.device,
            in_place=in_place, sharded=sharded, blocks=blocks, spans=[spans[i] for i in held],
        )  # fmt: skip
    # Free the weights of layers that are in no stage of this rank.
    here = {module for stage in stages.values() for module in stage.layers.modules()}
    for module in {module for _, layer in layers for module in layer.modules()} - here:
        for state in (module._parameters, module._buffers):
            state.update(dict.fromkeys(state))
    _hold(recomputed, stages)
    return stages, rest if context.rank == 0 else {}


def _hold(recomputed: list[RecomputedBlock], stages: dict[int, Stage]) -> None:
    """Assign recomputed blocks to their stages."""
    for stage in stages.values():
        here = set(stage.layers.modules())
        stage.recomputed = [block for block in recomputed if block.block in here]


def watch_stages(context: Context, job: TrainJob, stages: dict[int, Stage]) -> None:
    """Record what the layers hold."""
    numbers = next(iter(job.where.numbers.values()))
    for number, stage in stages.items():
        if job.where.partition is not None:
            watch(context.record, stage.layers, layers=False)  # blocks may be called with stand-ins
            continue
        flops = {
            name: (numbers[i].flops.forward, numbers[i].flops.backward)
            for name, i in zip(stage.layers._modules, job.where.stages[number], strict=True)
        }
        watch(context.record, stage.layers, flops=flops)


def _warn_if_not_finite(step: int, loss: float) -> bool:
    """Print a message if the loss is not finite, and return whether it is not."""
    if isfinite(loss):
        return False
    what = "nan" if isnan(loss) else "infinite"
    print(
        f"step {step}: the loss is {what}, and training goes on with it. A smaller learning rate, or gradients "
        "clipped, are the usual remedies; a log of 0 or a division by 0 in the loss the other cause."
    )
    return True

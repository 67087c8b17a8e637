"""Training on one rank: its stages, its optimizer, step after step.

place     the rank's own layers on its device, the rest let go
step      zero the gradients; forward and backward of the batch (`pipeline`); the optimizer
gather    the rank's weights back, on the CPU
"""

from __future__ import annotations

from math import isfinite, isnan
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.models.chain import chain
from mpkit.parallel.job import TrainJob
from mpkit.parallel.pipeline import Pipeline
from mpkit.parallel.stage import Stage
from mpkit.record.hooks import watch
from mpkit.schedule import build

if TYPE_CHECKING:
    from mpkit.launch.context import Context

__all__ = ["train"]


def train(context: Context, job: TrainJob) -> dict[str, Tensor]:
    """Do this rank's part of a training; what `Cluster.train` runs on every rank.

    Returns:
        The rank's part of the trained model's state dict: its stages' parameters and buffers, on the CPU.
    """
    torch.manual_seed(job.seed + context.rank)
    stages, rest = _place(context, job)
    optimizer = _optimizer(job, stages)
    _watch(context, job, stages, optimizer)
    pipeline = Pipeline(context, job, stages)
    told = False
    for step in range(job.steps):
        inputs, targets = job.batches[step % len(job.batches)]
        with context.record.step(step):
            if optimizer is not None:
                optimizer.zero_grad()
            loss = pipeline.step(inputs, targets)
            if loss is not None:
                context.record.loss(loss)
                told = told or _tell(step, loss)
            if optimizer is not None:
                optimizer.step()
    return rest | {name: value for stage in stages.values() for name, value in stage.state_dict().items()}


def _place(context: Context, job: TrainJob) -> tuple[dict[int, Stage], dict[str, Tensor]]:
    """This rank's stages by number; and what of the model's state is in no layer, which stays as it is."""
    model, job.model = job.model, None  # the other ranks' layers are let go
    assert model is not None
    layers = chain(model)
    names = tuple(f"{name}." for name, _ in layers)
    rest = {key: value for key, value in model.state_dict().items() if not key.startswith(names)}
    in_place = [any(numbers[i].in_place for numbers in job.numbers.values()) for i in range(len(layers))]
    stages = {}
    for number in build(job.plan).stages_of(context.rank):
        held = job.stages[number]
        stages[number] = Stage(
            number, [layers[i] for i in held], context.device, in_place=any(in_place[i] for i in held)
        )
    return stages, rest if 0 in stages else {}


def _optimizer(job: TrainJob, stages: dict[int, Stage]) -> torch.optim.Optimizer | None:
    """The optimizer of this rank's parameters, each of them once; None if there are none."""
    held = nn.ModuleList(stage.layers for stage in stages.values())
    parameters = list(held.parameters())
    return job.optimizer(parameters) if parameters else None


def _watch(
    context: Context, job: TrainJob, stages: dict[int, Stage], optimizer: torch.optim.Optimizer | None
) -> None:
    """Record what the layers hold, and what the optimizer does."""
    numbers = next(iter(job.numbers.values()))
    for number, stage in stages.items():
        flops = {
            name: (numbers[i].flops.forward, numbers[i].flops.backward)
            for name, i in zip(stage.layers._modules, job.stages[number], strict=True)
        }
        watch(context.record, stage.layers, optimizer, flops=flops)
        optimizer = None  # it has one step, however many stages


def _tell(step: int, loss: float) -> bool:
    """Say, once, that the loss is no number any more."""
    if isfinite(loss):
        return False
    what = "nan" if isnan(loss) else "infinite"
    print(
        f"step {step}: the loss is {what}, and training goes on with it. A smaller learning rate, or gradients "
        "clipped, are the usual remedies; a log of 0 or a division by 0 in the loss the other cause."
    )
    return True

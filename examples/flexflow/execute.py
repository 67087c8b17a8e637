"""The strategy found for each layer, on real ranks: `found.run(cluster, model, data, ...)`.

    check      in the caller's process: what cannot be executed is refused before a rank starts
    shard      a rank keeps its output channels of the layers that are split by parameters
    forward    for each layer: reshard its input, then compute this rank's part of its output
    backward   by autograd, through the same resharding; gradients of parameters are summed over those that have the
               same parameters and other samples or positions
    update     the optimizer works on what each rank keeps

Every rank computes the loss from the whole output, as serial training does.

Source: Jia, Zaharia, Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 7.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.flexflow.layer import Split, TensorLayout
from examples.flexflow.layout_exchange import (
    Box,
    Exchange,
    box_of,
    exchange_parts,
    place_of,
    take_box,
)
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.rank_context import Context
from mpkit.trace import Trace

__all__ = ["SHARDED", "Job", "LayerRun", "assemble_weights", "on_a_rank"]

SHARDED = (nn.Linear, nn.Conv2d)
"""Layers whose parameters are divided along their first dimension, the output channels."""

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class LayerRun:
    """Training with a strategy for each layer.

    Attributes:
        losses: by step.
        state_dict: the weights afterwards, whole.
        trace: what each rank did.
    """

    losses: list[float]
    state_dict: dict[str, Tensor]
    trace: Trace


@dataclass(frozen=True)
class Job:
    """What every rank is given.

    Attributes:
        layers: the chain, each layer with its name.
        splits: each layer's split.
        kept: for each layer, whether its input is divided by channels as its output is.
        data: (inputs, targets) of each step, whole batches.
        loss, optimizer: as in `Cluster.train`.
    """

    layers: list[tuple[str, nn.Module]]
    splits: list[Split]
    kept: list[bool]
    data: Sequence[tuple[Tensor, Tensor]]
    loss: Loss
    optimizer: MakeOptimizer


def work_of(split: Split) -> TensorLayout:
    """Return how a layer's work is divided."""
    return TensorLayout(split.sample, split.attribute, split.parameter)


class _Step:
    """What a rank computes of a chain.

    Args:
        comm: all ranks.
        job: the chain and its splits.
    """

    def __init__(self, context: Context, job: Job) -> None:
        self.context, self.job, self.comm = context, job, context.comm
        # ---- shard
        self.local = [
            self._shard_layer(layer, split) for (_, layer), split in zip(job.layers, job.splits, strict=True)
        ]
        self.groups = [self._group(work_of(split)) for split in job.splits]
        self.exchanges = self._exchanges()

    def _shard_layer(self, layer: nn.Module, split: Split) -> nn.Module:
        """Return the layer with this rank's output channels."""
        local = copy.deepcopy(layer).to(self.context.device)
        if split.parameter > 1:
            place = place_of(self.comm.rank, self.comm.size, work_of(split)).channel
            for parameter in local.parameters():
                parameter.data = parameter.data.chunk(split.parameter)[place].clone()
        return local

    def _group(self, work: TensorLayout) -> Communicator:
        """Return those with the same parameters; every rank makes all of these groups, in the same order."""
        ranks = range(self.comm.size)
        places = [place_of(rank, self.comm.size, work).channel for rank in ranks]
        groups = [
            self.comm.group([rank for rank in ranks if places[rank] == place])
            for place in range(work.channel)
        ]
        return groups[places[self.comm.rank]]

    def _exchanges(self) -> list[Exchange]:
        """Return the resharding before each layer, and that before the loss."""
        n, ranks = self.comm.size, range(self.comm.size)
        there: list[Box] = [box_of(rank, n, TensorLayout()) for rank in ranks]
        made = []
        for split, kept in zip(self.job.splits, self.job.kept, strict=True):
            work = work_of(split)
            wanted = [box_of(rank, n, work, channels=kept) for rank in ranks]
            made.append(Exchange(self.comm, there, wanted, n // work.parts, kept or work.channel == 1))
            there = [box_of(rank, n, work) for rank in ranks]
        return [
            *made,
            Exchange(self.comm, there, [box_of(rank, n, TensorLayout()) for rank in ranks], n, True),
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole output of the chain for a whole batch."""
        # ---- the batch is there on every rank
        x = take_box(x, self.exchanges[0].wanted[self.comm.rank])
        for i, layer in enumerate(self.local):
            if i:
                x = exchange_parts(x, self.exchanges[i])
            with self.context.record.span(self.job.layers[i][0]):
                x = layer(x)
        return exchange_parts(x, self.exchanges[-1])

    def sum_gradients(self) -> None:
        """Sum the gradients over those that have the same parameters; copies of the same work count once."""
        for layer, split, group in zip(self.local, self.job.splits, self.groups, strict=True):
            if split.sample * split.attribute == 1:
                continue
            for parameter in layer.parameters():
                if parameter.grad is not None:
                    group.all_reduce(parameter.grad)
                    parameter.grad.div_(self.comm.size // work_of(split).parts)


def on_a_rank(context: Context, job: Job) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Train; return the losses by step, and this rank's weights of each layer."""
    step = _Step(context, job)
    parameters = [
        parameter for layer in step.local for parameter in layer.parameters() if parameter.requires_grad
    ]
    optimizer = job.optimizer(parameters)
    losses = []
    for inputs, targets in job.data:
        # ---- forward
        outputs = step.forward(inputs.to(context.device))
        loss = job.loss(outputs, targets.to(context.device))
        # ---- backward
        optimizer.zero_grad()
        loss.backward()
        step.sum_gradients()
        # ---- update
        optimizer.step()
        losses.append(loss.item())
    return losses, [{key: value.cpu() for key, value in layer.state_dict().items()} for layer in step.local]


def assemble_weights(job: Job, by_rank: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the whole weights, from those that ranks kept of each layer."""
    whole = {}
    for i, ((name, _), split) in enumerate(zip(job.layers, job.splits, strict=True)):
        places = [place_of(rank, len(by_rank), work_of(split)).channel for rank in range(len(by_rank))]
        holders = [by_rank[places.index(place)][i] for place in range(split.parameter)]
        for key, value in holders[0].items():
            parts = [holder[key] for holder in holders]
            whole[f"{name}.{key}"] = torch.cat(parts) if split.parameter > 1 else value
    return whole

"""A row of actions that an answer runs itself: stages, micro-batches, and what each rank did, in order.

stages, batches    a model in parts, one per rank, and its data
serial             the gradients of one device, of the mean over all micro-batches
observe            the forwards and backwards of a stage as they happen, by micro-batch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpkit.course.framework.exercise import Case
from mpkit.course.framework.serial import fill

__all__ = ["LAYERS", "UNIT", "batches", "observe", "serial", "stages"]

SAMPLES, WIDTH, LAYERS = 32, 16, 6

UNIT = SAMPLES * WIDTH * 8
"""Bytes of one micro-batch between two layers: of each activation, message, gradient."""


def stages(case: Case) -> list[nn.Sequential]:
    """Return one stage per rank, of `LAYERS` linear layers with tanh each."""
    layers = fill(
        nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS * case.ranks))
        ),
        case.seed,
    )
    return [nn.Sequential(*list(layers)[LAYERS * rank : LAYERS * (rank + 1)]) for rank in range(case.ranks)]


def batches(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and targets of each micro-batch, (samples, width)."""
    shape = (2, case["microbatches"], SAMPLES, WIDTH)
    xs, ys = torch.randn(shape, generator=case.generator(), dtype=torch.float64)
    return list(xs), list(ys)


def serial(case: Case) -> list[dict[str, Tensor | None]]:
    """Return the gradients of each stage, of the mean loss over all micro-batches, as one device computes them."""
    parts, (xs, ys) = stages(case), batches(case)
    whole = nn.Sequential(*parts)
    F.mse_loss(whole(torch.cat(xs)), torch.cat(ys)).backward()
    return [{name: parameter.grad for name, parameter in stage.named_parameters()} for stage in parts]


def observe(stage: nn.Module, row: Sequence[str]) -> list[str]:
    """Return a list that fills as the stage works: "F0", "F1", "B0", numbered as the forwards of `row` are.

    >>> stage = nn.Linear(2, 2)
    >>> done = observe(stage, ["F0", "F1", "B1", "B0"])
    >>> for output in reversed([stage(torch.ones(1, 2)), stage(torch.ones(1, 2))]):
    ...     output.sum().backward()
    >>> done
    ['F0', 'F1', 'B1', 'B0']
    """
    numbers = iter([action[1:] for action in row if action.startswith("F")])
    done: list[str] = []

    def forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        number = next(numbers, "?")
        done.append(f"F{number}")
        if output.requires_grad:
            output.register_hook(lambda gradient: done.append(f"B{number}"))

    stage.register_forward_hook(forward)
    return done

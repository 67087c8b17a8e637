"""What parallel training is compared with: the same training on one process, in plain PyTorch.

As anyone would write it.

serial         trains
same           a run's losses and weights are these
check_equal    both: training by a plan equals serial training
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.api.run import Run

Train = Callable[..., Run]

EXACT = {"rtol": 1e-8, "atol": 1e-10}
SINGLE = {"rtol": 1e-4, "atol": 1e-6}


def called(model: nn.Module, inputs: Any, part: slice = slice(None)) -> Any:
    """The model's outputs for some of the samples."""
    if isinstance(inputs, dict):
        return model(**{name: x[part] for name, x in inputs.items()})
    return model(*(x[part] for x in (inputs if isinstance(inputs, tuple) else (inputs,))))


def serial(
    model: nn.Module, data: Any, *, loss: Any, optimizer: Any, steps: int = 5, microbatches: int = 1,
    max_grad_norm: float | None = None, lr_schedule: Callable[[int], float] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """Losses by step, and the weights afterwards. Micro-batches matter to what mixes samples, such as BatchNorm."""
    model = copy.deepcopy(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    trained = [p for _, p in named]
    opt = optimizer(named if getattr(optimizer, "by_name", False) else trained)
    rates = [group["lr"] for group in opt.param_groups]
    losses = []
    for step in range(steps):
        inputs, targets = data[step % len(data)]
        opt.zero_grad()
        total = 0.0
        for samples in torch.arange(len(targets)).tensor_split(microbatches):
            part = slice(int(samples[0]), int(samples[-1]) + 1)
            value = loss(called(model, inputs, part), targets[part]) * len(samples) / len(targets)
            value.backward()
            total += value.item()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(trained, max_grad_norm)
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate * (lr_schedule(step) if lr_schedule is not None else 1.0)
        opt.step()
        losses.append(total)
    return losses, model.state_dict()


def same(run: Run, losses: list[float], weights: dict[str, Tensor], *, rtol: float, atol: float) -> None:
    """The run's losses and weights are these, by the same names."""
    assert run.losses == pytest.approx(losses, rel=rtol, abs=atol)
    assert list(run.state_dict()) == list(weights)
    for name, value in run.state_dict().items():
        torch.testing.assert_close(
            value, weights[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def check_equal(
    train: Train,
    model: nn.Module,
    data: Any,
    plan: mk.Plan,
    *,
    microbatches: int = 1,
    steps: int = 5,
    **how: Any,
) -> Run:
    """Losses and weights after training by `plan` are those of serial training, in so many micro-batches."""
    exact = next(model.parameters()).dtype == torch.float64
    losses, weights = serial(model, data, microbatches=microbatches, steps=steps, **how)
    run = train(model, data, plan, steps=steps, **how)
    same(run, losses, weights, **(EXACT if exact else SINGLE))
    return run

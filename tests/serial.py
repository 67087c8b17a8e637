"""What parallel training is compared with: the same training on one process, in plain PyTorch.

As anyone would write it.

serial         trains; `trained` also averages weights and evaluates
same           a run's losses and weights are these
check_equal    both: training by a plan equals serial training
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.launch.session.run import Run

Clusters = Callable[[int], mk.Cluster]
Train = Callable[..., Run]
"""Of the fixtures: clusters by number of ranks; a training, waited for."""

EXACT = {"rtol": 1e-8, "atol": 1e-10}
SINGLE = {"rtol": 1e-4, "atol": 1e-6}


def called(model: nn.Module, inputs: Any, part: slice = slice(None), dtype: torch.dtype | None = None) -> Any:
    """The model's outputs for some of the samples."""

    def taken(x: Tensor) -> Tensor:
        return x[part].to(dtype) if dtype and x.is_floating_point() else x[part]

    if isinstance(inputs, dict):
        return model(**{name: taken(x) for name, x in inputs.items()})
    return model(*map(taken, inputs if isinstance(inputs, tuple) else (inputs,)))


class Trained(NamedTuple):
    """Losses by step, the weights afterwards, their average over the steps, and the losses of held-out data by step."""

    losses: list[float]
    weights: dict[str, Tensor]
    average: dict[str, Tensor]
    evaluated: list[float]


def serial(model: nn.Module, data: Any, **how: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses by step, and the weights afterwards. Micro-batches matter to what mixes samples, such as BatchNorm."""
    return trained(model, data, **how)[:2]


def trained(
    model: nn.Module, data: Any, *, loss: Any, optimizer: Any, steps: int = 5, microbatches: int = 1,
    max_grad_norm: float | None = None, lr_schedule: Callable[[int], float] | None = None,
    count: Callable[[Tensor], Any] = len, mean: bool = True, dtype: torch.dtype | None = None,
    decay: float = 0.0, held_out: Any = (),
) -> Trained:  # fmt: skip
    """Train; the loss is a mean over what `count` counts in targets, or a sum; 16 bits have masters of 32."""
    model = copy.deepcopy(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    masters = [(name, nn.Parameter(p.detach().clone()) if dtype else p) for name, p in named]
    model = model.to(dtype) if dtype else model
    updated = [p for _, p in masters]
    opt = optimizer(masters if getattr(optimizer, "by_name", False) else updated)
    rates = [group["lr"] for group in opt.param_groups]

    def total(inputs: Any, targets: Tensor, part: slice = slice(None)) -> Tensor:
        value: Tensor = loss(called(model, inputs, part, dtype), targets[part])
        return value * count(targets[part]) if mean else value

    scale = 2.0**16 if dtype == torch.float16 else 1.0
    average: dict[str, Tensor] = {}
    losses, evaluated = [], []
    for step in range(steps):
        inputs, targets = data[step % len(data)]
        model.zero_grad()
        losses.append(0.0)
        for samples in torch.arange(len(targets)).tensor_split(microbatches):
            part = slice(int(samples[0]), int(samples[-1]) + 1)
            value = total(inputs, targets, part) / count(targets)
            (value * scale).backward()
            losses[-1] += value.item()
        if dtype:
            for (_, p), master in zip(named, updated, strict=True):
                master.grad = p.grad.float() / scale
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(updated, max_grad_norm)
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate * (lr_schedule(step) if lr_schedule is not None else 1.0)
        opt.step()
        with torch.no_grad():
            for (name, p), master in zip(named, updated, strict=True):
                p.copy_(master)
                average.setdefault(name, master.clone()).lerp_(master, 1.0 - decay)
            if held_out:
                model.eval()
                evaluated.append(
                    float(sum(total(*each) for each in held_out) / sum(count(y) for _, y in held_out))
                )
                model.train()
    master_of = {p: master.detach() for (_, p), (_, master) in zip(named, masters, strict=True)}
    weights = {name: master_of.get(p, p.detach()) for name, p in model.state_dict(keep_vars=True).items()}
    return Trained(losses, weights, average, evaluated)


def same(run: Run, losses: list[float], weights: dict[str, Tensor], *, rtol: float, atol: float) -> None:
    """The run's losses and weights are these, by the same names."""
    assert run.losses == pytest.approx(losses, rel=rtol, abs=atol)
    assert list(run.state_dict()) == list(weights)
    for name, value in run.state_dict().items():
        torch.testing.assert_close(
            value, weights[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def check_equal(
    train: Train, model: nn.Module, data: Any, plan: mk.Plan, *, microbatches: int = 1, steps: int = 5,
    **how: Any,
) -> Run:  # fmt: skip
    """Losses and weights after training by `plan` are those of serial training, in so many micro-batches."""
    exact = next(model.parameters()).dtype == torch.float64
    losses, weights = serial(model, data, microbatches=microbatches, steps=steps, **how)
    run = train(model, data, plan, steps=steps, **how)
    same(run, losses, weights, **(EXACT if exact else SINGLE))
    return run

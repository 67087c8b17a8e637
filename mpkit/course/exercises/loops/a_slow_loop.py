"""Profile a slow loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks

# %% given
from mpkit.course.lab.accelerator import Accelerator, LabSource


# %% answer
def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, source: LabSource, steps: int
) -> dict[str, Any]:
    """Train for some steps; return the losses and the gradients' norms as lists of numbers, and the final weights."""
    losses, norms = [], []
    ### BEGIN SOLUTION
    # instead: snapshots = []
    # instead: for step in range(steps):
    # instead:     x, y = source.read(step)
    # instead:     loss = F.mse_loss(model(x), y)
    # instead:     optimizer.zero_grad()
    # instead:     loss.backward()
    # instead:     losses.append(loss.item())
    # instead:     norms.append(sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5)
    # instead:     optimizer.step()
    # instead:     snapshots.append({name: p.detach().clone() for name, p in model.named_parameters()})
    # instead: return {"losses": losses, "norms": norms, "weights": snapshots[-1]}
    reading = source.start(0)
    for step in range(steps):
        x, y = reading.get()
        if step + 1 < steps:
            reading = source.start(step + 1)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
        optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses).tolist(), "norms": torch.stack(norms).tolist(), "weights": weights}
    ### END SOLUTION


# %% checks
SAMPLES = 16
SYNCS, COPIED, AHEAD, IDLE = "synchronizations", "bytes copied", "batches read ahead", "seconds without work"


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run the answer on an accelerator; record what it counted, for the budgets."""
    model = serial.model(case.seed)
    optimizer = serial.sgd(model)
    data = serial.batches(case, SAMPLES, case["steps"])
    with Accelerator() as device:
        source = LabSource(data, device)
        result = answer(model, optimizer, source, case["steps"])
    for name, amount in zip((SYNCS, COPIED, AHEAD, IDLE), _counted(device, source), strict=True):
        with ctx.record.span(name, flops=amount):
            pass
    return result


def _counted(device: Accelerator, source: LabSource) -> tuple[float, ...]:
    return device.syncs, device.copied, source.most_open, device.idle


def expected(case: Case) -> list[dict[str, object]]:
    """Return the same, of a plain loop."""
    model, data = serial.model(case.seed), serial.batches(case, SAMPLES, case["steps"])
    optimizer = serial.sgd(model)
    losses, norms = [], []
    for x, y in data:
        loss = serial.mse(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        losses.append(loss.item())
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
        optimizer.step()
    return [{"losses": losses, "norms": norms, "weights": serial.weights(model)}]


def counted(name: str) -> Callable[[Seen], float]:
    """Return a measure: what the accelerator has counted under a name."""

    def of(seen: Seen) -> float:
        assert seen.trace is not None
        (rank,) = seen.trace.ranks
        return float(next(op["flops"] for op in rank.ops if rank.name(int(op["name"])) == name))

    return of


SIZE = sum(parameter.nbytes for parameter in serial.model(0).parameters())
FASTER = {SYNCS: 4, COPIED: 3 * SIZE, AHEAD: 2}

EXERCISE = OnRanks(
    solution=train,
    cases=(Case(1, 1, {"steps": 10}), Case(1, 2, {"steps": 16})),
    play=play,
    expected=expected,
    result="losses, norms and weights",
    budgets=(
        *(Budget(name, counted(name), most, "bytes" * (name == COPIED)) for name, most in FASTER.items()),
        Budget(IDLE, counted(IDLE), 6e-3, "seconds"),
    ),
    after="08-your-own-program",
    place=30,
    when={
        "reads-the-loss-in-every-step": lambda seen: (
            seen.budget == SYNCS and counted(SYNCS)(seen) <= 2 * seen.case["steps"]
        ),
        "reads-a-number-per-parameter": lambda seen: seen.budget == SYNCS,
        "snapshots-of-every-step": lambda seen: seen.budget == COPIED,
        "reads-everything-first": lambda seen: seen.budget == AHEAD,
        "starts-and-waits": lambda seen: seen.budget == IDLE and counted(AHEAD)(seen) > 0,
        "the-host-reads": lambda seen: seen.budget == IDLE,
    },
)

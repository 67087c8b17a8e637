"""Autocast and a loss scale on ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import collectives
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def train(
    ctx: mk.Context,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    interval: int,
    max_norm: float,
) -> dict[str, list[float]]:
    """Train in fp16 on this rank's batches, in which all ranks step alike or not at all.

    scale: of the loss, at the beginning. interval: the scale doubles after so many steps in a row.
    max_norm: of the whole gradient. Returns "losses", this rank's, and "scales", after each batch.
    """
    result: dict[str, list[float]] = {"losses": [], "scales": []}
    good = 0  # steps in a row
    for x, y in batches:
        ### BEGIN SOLUTION
        # instead: raise NotImplementedError("your turn: forward and backward, all-reduce, step or skip, scale")
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        (loss * scale).backward()
        gradients = [p.grad for p in model.parameters()]
        for gradient in gradients:
            ctx.comm.all_reduce(gradient, op="mean")
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if finite:
            for gradient in gradients:
                gradient /= scale
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            good += 1
            if good == interval:
                scale, good = 2 * scale, 0
        else:
            scale, good = scale / 2, 0
        ### END SOLUTION
        result["losses"].append(loss.item())
        result["scales"].append(scale)
    return result


# %% checks
WIDTH, SAMPLES, STEPS, SCALE = 8, 4, 10, 2.0**13
PARAMETERS = 4


def model(case: Case) -> nn.Sequential:
    """Return two layers in fp32, the same on every rank."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return serial.fill(layers, case.seed).float()


def batches(case: Case, rank: int) -> list[serial.Batch]:
    """Return a rank's batches. In some steps one rank's targets are so large that its gradients overflow in fp16."""
    x, y = torch.randn(2, STEPS, SAMPLES, WIDTH, generator=case.generator(rank))
    for number, step in enumerate(case["overflows"]):
        if rank == (case.seed + number) % case.ranks:
            y[step] *= 1e4
    return list(zip(x, y, strict=True))


def watch_dtypes(layers: nn.Sequential) -> set[str]:
    """Return a set that fills with the dtypes in which the layers compute."""
    dtypes: set[str] = set()
    for layer in layers.children():
        layer.register_forward_hook(lambda module, inputs, output: dtypes.add(str(output.dtype)))
    return dtypes


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Train; return losses, scales, weights and the dtypes in which the layers compute."""
    layers = model(case)
    dtypes = watch_dtypes(layers)
    result = answer(
        ctx, layers, serial.sgd(layers), batches(case, ctx.rank), SCALE, case["interval"], case["max_norm"]
    )
    return {**result, "weights": serial.weights(layers), "dtypes": sorted(dtypes)}


def expected(case: Case) -> list[dict[str, Any]]:
    """Return the same, by one device that goes through the ranks' batches one after the other."""
    layers, scale, good = model(case), SCALE, 0
    optimizer, n = serial.sgd(layers), case.ranks
    dtypes = watch_dtypes(layers)
    losses: list[list[float]] = [[] for _ in range(n)]
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(n):
            x, y = batches(case, rank)[step]
            with torch.autocast("cpu", torch.float16):
                loss = serial.mse(layers(x), y)
            torch.autograd.backward(loss * scale)
            losses[rank].append(loss.item())
        gradients = [p.grad for p in layers.parameters() if p.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            for gradient in gradients:
                gradient /= n * scale
            nn.utils.clip_grad_norm_(layers.parameters(), case["max_norm"])
            optimizer.step()
            good += 1
        else:
            scale, good = scale / 2, 0
        if good == case["interval"]:
            scale, good = 2 * scale, 0
        scales.append(scale)
    same = {"scales": scales, "weights": serial.weights(layers), "dtypes": sorted(dtypes)}
    return [{"losses": each, **same} for each in losses]


def in_fp32(seen: Seen) -> bool:
    """Return whether the layers compute in fp32."""
    return seen.got is not None and seen.got[0]["dtypes"] == ["torch.float32"]


def stepped_with_nan(seen: Seen) -> bool:
    """Return whether some rank's loss is not a number."""
    return seen.got is not None and any(math.isnan(loss) for got in seen.got for loss in got["losses"])


EXERCISE = OnRanks(
    solution=train,
    cases=(
        Case(2, 1, {"overflows": (2,), "interval": 3, "max_norm": 100.0}),
        Case(3, 2, {"overflows": (1, 6), "interval": 2, "max_norm": 0.5}),
        Case(4, 3, {"overflows": (0, 4, 5), "interval": 4, "max_norm": 0.8}),
    ),
    play=play,
    expected=expected,
    result="losses, scales and weights",
    budgets=(Budget("collectives", collectives, PARAMETERS * STEPS),),
    after="12-images",
    place=25,
    when={
        "no-autocast": in_fp32,
        "waits-for-a-rank-that-skips": lambda seen: seen.hang or seen.mismatch,
        "asks-about-its-own-gradients": stepped_with_nan,
        "one-collective-more": lambda seen: seen.budget == "collectives",
    },
)

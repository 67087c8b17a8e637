"""Offload: keep the optimizer on the host.

Optimizer states are touched once per step. They may as well live in the host's memory, and the step be taken there. The
price is two copies over the bus between device and host: gradients there, parameters back.

    device   backward → reduce-scatter                    all-gather → next step
                              ↓ host.put(gradients)   ↑ host.get(parameters)
    host                      step of this rank's n-th

Write ZeRO with its optimizer on the host. `host.put(tensor)` is a copy of a device's tensor on the host,
`host.get(tensor)` one of a host's tensor on the device. As with a real GPU, no operator takes tensors of both, and an
optimizer's states are where its parameters are. `flat` and `unflat` are those of ZeRO-1.

Budget: no bytes of optimizer states on the device, and over the bus an n-th of the gradients there and an n-th of the
parameters back, in each step (and an n-th of the parameters there, once, at the beginning).

Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.exercises.zero import flat, unflat
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import copied_bytes, peak, ring
from mpkit.course.framework.memory import Host, Memory
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.trace import Kind


# %% answer
def offload(
    ctx: mk.Context,
    host: Host,
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> None:
    """Train `model`, which is on the device and the same on every rank: one step per batch, with `F.mse_loss`.

    host: `host.put(tensor)`, `host.get(tensor)`.
    batches: (x, y) of this rank, one per step; a step's whole batch is that of all ranks, in equal shares.
    make_optimizer: makes an Adam for a list of tensors, as in `make_optimizer([shard])`.
    """
    n = ctx.world_size
    weights = list(model.parameters())
    ### BEGIN SOLUTION
    shard = host.put(flat(weights, n).chunk(n)[ctx.rank])
    optimizer = make_optimizer([shard])
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        grads = flat([weight.grad for weight in weights if weight.grad is not None], n)
        model.zero_grad()
        shard.grad = host.put(ctx.comm.reduce_scatter(grads) / n)
        optimizer.step()
        unflat(ctx.comm.all_gather(host.get(shard)), weights)
    ### END SOLUTION


# %% checks
SAMPLES, STEPS = 12, 3
OPTIMIZER = "bytes of optimizer states on the device"
DOWN, UP = "bytes copied to the host", "bytes copied to the device"
SENT = "bytes that a rank sends, on a ring"


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the model's weights after the answer has trained it."""
    assert callable(answer)
    model = serial.model(case.seed)
    mine = [serial.share(batch, ctx.rank, ctx.world_size) for batch in serial.batches(case, SAMPLES, STEPS)]
    with Memory(ctx, model.parameters()) as memory:
        answer(ctx, Host(ctx, memory), model, mine, serial.adam)
    return serial.weights(model)


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the weights that serial training gives."""
    model, data = serial.model(case.seed), serial.batches(case, SAMPLES, STEPS)
    return [serial.train(model, data, optimizer=serial.adam)["weights"]] * case.ranks


def shard_bytes(case: Case) -> int:
    """Return the bytes of one rank's n-th of the parameters."""
    psi = sum(weight.numel() for weight in serial.model(0).parameters())
    return -(-psi // case.ranks) * 8


EXERCISE = OnRanks(
    solution=offload,
    cases=(Case(2, seed=51), Case(3, seed=52), Case(4, seed=53)),
    play=play,
    expected=expected,
    result=f"the weights after {STEPS} steps",
    budgets=(
        Budget(OPTIMIZER, peak("optimizer"), 0, "bytes"),
        Budget(UP, copied_bytes(Kind.COPY_TO_DEVICE), lambda case: STEPS * shard_bytes(case), "bytes"),
        Budget(DOWN, copied_bytes(Kind.COPY_TO_HOST), lambda case: (STEPS + 1) * shard_bytes(case), "bytes"),
        Budget(SENT, ring, lambda case: STEPS * 2 * (case.ranks - 1) * shard_bytes(case), "bytes"),
    ),
    after="03-zero",
    place=60,
    start="Begin with your solution of ZeRO-1. Which of its tensors have to be on the host, so that Adam's states "
    "are? Then follow the arrows of the drawing: what goes down before the step, and what comes up after it?",
    mistakes=(
        Mistake(
            "optimizer-on-the-device",
            (
                "The training is right. Where are Adam's two means?",
                "An optimizer makes its states where its parameters are. Give it a shard that is on the host.",
                "`shard = host.put(flat(weights, n).chunk(n)[ctx.rank])`, and then `make_optimizer([shard])`.",
            ),
            [
                (
                    "host.put(flat(weights, n).chunk(n)[ctx.rank])",
                    "flat(weights, n).chunk(n)[ctx.rank].clone()",
                ),
                ("host.put(ctx.comm.reduce_scatter(grads) / n)", "ctx.comm.reduce_scatter(grads) / n"),
                ("host.get(shard)", "shard"),
            ],
            when=lambda seen: seen.budget == OPTIMIZER,
        ),
        Mistake(
            "gradient-left-on-the-device",
            (
                "Torch says that one operator got tensors of the device and of the host. Which are these?",
                "The optimizer steps on the host, with a gradient that is on the device: it has to be copied there "
                "first.",
                "`shard.grad = host.put(...)`",
            ),
            [("host.put(ctx.comm.reduce_scatter(grads) / n)", "ctx.comm.reduce_scatter(grads) / n")],
            when=lambda seen: "same device" in seen.error,
        ),
        Mistake(
            "whole-gradients-over-the-bus",
            (
                "How many numbers does the host need in a step, if this rank updates an n-th?",
                "Every rank copies all gradients to the host, and uses an n-th of them. The bus is the slowest link "
                "there is: reduce-scatter on the device, then copy what is left.",
                "`host.put(ctx.comm.reduce_scatter(grads) / n)`",
            ),
            [
                (
                    "host.put(ctx.comm.reduce_scatter(grads) / n)",
                    'host.put(ctx.comm.all_reduce(grads, op="mean")).chunk(n)[ctx.rank]',
                )
            ],
            when=lambda seen: seen.budget == DOWN,
        ),
        Mistake(
            "whole-optimizer",
            (
                "How many numbers come back from the host in a step, and how many did this rank have to update?",
                "Each rank updates its own n-th, and gets those of the others from them: links between devices are "
                "faster than the bus.",
            ),
            [
                ("flat(weights, n).chunk(n)[ctx.rank]", "flat(weights, n)"),
                (
                    "host.put(ctx.comm.reduce_scatter(grads) / n)",
                    'host.put(ctx.comm.all_reduce(grads, op="mean"))',
                ),
                ("ctx.comm.all_gather(host.get(shard))", "host.get(shard)"),
            ],
            when=lambda seen: seen.budget == UP,
        ),
        Mistake(
            "stale-weights",
            (
                "The host's parameters move. With which does the model compute?",
                "The step changes the host's copy. As long as that does not come back, the device goes on with the "
                "parameters that it began with, and nothing says so: the loss is only a little too high.",
                "After the step: `unflat(ctx.comm.all_gather(host.get(shard)), weights)`.",
            ),
            [("unflat(ctx.comm.all_gather(host.get(shard)), weights)", "host.get(shard)")],
        ),
        Mistake(
            "summed-not-averaged",
            (
                "A reduce-scatter adds up. Over how many samples is the loss of serial training a mean?",
                "The gradient of the whole batch is the mean of the ranks' gradients: divide by n.",
            ),
            [("(grads) / n", "(grads)")],
        ),
        Mistake(
            "gradients-pile-up",
            (
                "The first step is right. What is in `weight.grad` before the second backward?",
                "The optimizer knows the shard on the host only; the gradients of the model are yours to set to "
                "zero.",
            ),
            [("        model.zero_grad()\n", "")],
        ),
    ),
    otherwise=(
        "Write it without the host first (that is ZeRO-1); then put `host.put` and `host.get` where the arrows are.",
    ),
)

"""ZeRO-1: shard the optimizer states.

In plain data parallelism every rank holds Adam's two means of every parameter, and all hold the same ones. Let each
rank hold an n-th of them, and step the parameters that belong to these:

    backward         every rank has gradients of all parameters, of its own batch
    reduce-scatter   rank r gets the mean gradient of its own n-th, and of no more
    step             rank r updates its own n-th
    all-gather       everybody gets everybody's

`flat` puts all parameters (or gradients) one after the other into one tensor, with zeros at its end so that n divides
it; `unflat` copies such a tensor back into the parameters. The n-th of rank r is `whole.chunk(n)[r]`.

Your ranks have to end with the parameters of serial training on the batches of all ranks together. Budget: Adam's
states of an n-th of the parameters, two collectives per step, and no more bytes than an all-reduce of the gradients
sends: 2ψ(n-1)/n numbers per rank.

Source: Rajbhandari et al., SC 2020, section 5.1 (P_os).
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
from mpkit.course.framework.measures import collectives, peak, ring
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def zero_1(
    ctx: mk.Context,
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> None:
    """Train `model`, which is the same on every rank, in place: one step per batch, with the loss `F.mse_loss`.

    batches: (x, y) of this rank, one per step; a step's whole batch is that of all ranks, in equal shares.
    make_optimizer: makes an Adam for a list of tensors, as in `make_optimizer([shard])`.
    """
    ### BEGIN SOLUTION
    n = ctx.world_size
    weights = list(model.parameters())
    shard = flat(weights, n).chunk(n)[ctx.rank].clone()
    optimizer = make_optimizer([shard])
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        grads = flat([weight.grad for weight in weights if weight.grad is not None], n)
        shard.grad = ctx.comm.reduce_scatter(grads) / n
        optimizer.step()
        unflat(ctx.comm.all_gather(shard), weights)
        model.zero_grad()
    ### END SOLUTION


# %% checks
SAMPLES, STEPS = 12, 3
OPTIMIZER = "bytes of optimizer states"
SENT = "bytes that a rank sends, on a ring"


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the model's weights after the answer has trained it."""
    assert callable(answer)
    model = serial.model(case.seed)
    mine = [serial.share(batch, ctx.rank, ctx.world_size) for batch in serial.batches(case, SAMPLES, STEPS)]
    with Memory(ctx, model.parameters()):
        answer(ctx, model, mine, serial.adam)
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
    solution=zero_1,
    cases=(Case(2, seed=11), Case(3, seed=12), Case(4, seed=13)),
    play=play,
    expected=expected,
    result=f"the weights after {STEPS} steps",
    budgets=(
        Budget(OPTIMIZER, peak("optimizer"), lambda case: 2 * shard_bytes(case), "bytes"),
        Budget("collectives", collectives, 2 * STEPS),
        Budget(SENT, ring, lambda case: STEPS * 2 * (case.ranks - 1) * shard_bytes(case), "bytes"),
    ),
    after="03-zero",
    place=20,
    start="Before the loop: put all parameters into one tensor with `flat`, take a copy of your n-th of it (your "
    "shard), and make an optimizer of that alone. In the loop there are four lines, one for each line of the "
    "drawing.",
    mistakes=(
        Mistake(
            "whole-optimizer",
            (
                "The parameters are right. What does every rank's Adam hold two means of?",
                "An optimizer holds states of all that it is given. Give it this rank's shard, and nothing else.",
                "`optimizer = make_optimizer([shard])`, with `shard = flat(weights, n).chunk(n)[ctx.rank].clone()`.",
            ),
            [
                (".chunk(n)[ctx.rank].clone()", ""),
                ("ctx.comm.reduce_scatter(grads) / n", 'ctx.comm.all_reduce(grads, op="mean")'),
                ("unflat(ctx.comm.all_gather(shard), weights)", "unflat(shard, weights)"),
            ],
            when=lambda seen: seen.budget == OPTIMIZER,
        ),
        Mistake(
            "all-reduces-the-gradients",
            (
                "Which of the gradients that a rank receives does it use?",
                "An all-reduce is a reduce-scatter and an all-gather, so you pay for three halves of it. A rank "
                "needs the sum of its own n-th only.",
                "`ctx.comm.reduce_scatter(grads)` gives just that n-th.",
            ),
            [("ctx.comm.reduce_scatter(grads) / n", "ctx.comm.all_reduce(grads).chunk(n)[ctx.rank] / n")],
            when=lambda seen: seen.budget == SENT,
        ),
        Mistake(
            "summed-not-averaged",
            (
                "A reduce-scatter adds up. The loss of serial training is the mean over how many samples?",
                "Each rank's gradient is that of a mean over its own samples. Of n such gradients the batch's is the "
                "mean, not the sum: divide by n.",
            ),
            [("reduce_scatter(grads) / n", "reduce_scatter(grads)")],
        ),
        Mistake(
            "no-all-gather",
            (
                "Compare the parameters on two ranks after a step. Who has updated which?",
                "A rank updates its n-th only. The others' it has to be given, before the next forward.",
                "After the step: `unflat(ctx.comm.all_gather(shard), weights)`.",
            ),
            [
                (
                    "unflat(ctx.comm.all_gather(shard), weights)",
                    "whole = list(flat(weights, n).chunk(n))\n        whole[ctx.rank] = shard\n"
                    "        unflat(torch.cat(whole), weights)",
                )
            ],
        ),
        Mistake(
            "gradients-pile-up",
            (
                "The first step is right. What is in `weight.grad` before the second backward?",
                "A backward adds to the gradients that are there. The optimizer knows only your shard, so nobody "
                "else sets those of the model to zero: `model.zero_grad()`.",
            ),
            [("        model.zero_grad()\n", "")],
        ),
        Mistake(
            "own-gradients-only",
            (
                "Of whose samples is the gradient that a rank steps with?",
                "Each rank steps its n-th for all. So that n-th needs the gradient of all ranks' samples: a "
                "reduce-scatter, before the step.",
            ),
            [("ctx.comm.reduce_scatter(grads) / n", "grads.chunk(n)[ctx.rank].clone()")],
        ),
    ),
    otherwise=(
        "Take one step on 2 ranks, and print on each its shard's gradient and the parameters afterwards.",
        "Compare with one device: which of the four lines of the drawing gives something else?",
    ),
)

"""ZeRO-2: shard the gradients as well.

In ZeRO-1 a rank holds gradients of all parameters until the backward is over, and then keeps the sums of its own n-th
only. Do not wait so long: as soon as the backward has made a parameter's gradient, reduce-scatter it, keep your n-th,
and free the rest. Then no rank ever holds the gradients of more than one parameter whole.

`parameter.register_post_accumulate_grad_hook(hook)` calls `hook(parameter)` as soon as `parameter.grad` is complete.
`flat([tensor], n)` is a tensor flattened, with zeros at its end so that n divides it. The n-th of rank r is
`flat([tensor], n).chunk(n)[r]`; each parameter is divided by itself here.

Budget: bytes of gradients (an n-th of all, and of a few parameters the whole), of optimizer states (an n-th), and what
is sent: 2ψ(n-1)/n numbers per rank per step, as in ZeRO-1, in two collectives for each parameter.

Source: Rajbhandari et al., SC 2020, section 5.2 (P_os+g).
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
def zero_2(
    ctx: mk.Context,
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> None:
    """Train `model`, which is the same on every rank, in place: one step per batch, with the loss `F.mse_loss`.

    batches: (x, y) of this rank, one per step; a step's whole batch is that of all ranks, in equal shares.
    make_optimizer: makes an Adam for a list of tensors, as in `make_optimizer(shards)`.
    """
    n = ctx.world_size
    weights = list(model.parameters())
    ### BEGIN SOLUTION
    # instead: shards = ...  # of each weight, this rank's n-th
    # instead: optimizer = ...
    # instead: ...
    # instead: raise NotImplementedError("your turn: the hooks, and the steps")
    shards = [flat([weight], n).chunk(n)[ctx.rank].clone() for weight in weights]
    shard_of: dict[Tensor, Tensor] = dict(zip(weights, shards, strict=True))
    optimizer = make_optimizer(shards)

    def reduce(weight: Tensor) -> None:
        assert weight.grad is not None
        shard_of[weight].grad = ctx.comm.reduce_scatter(flat([weight.grad], n)) / n
        weight.grad = None

    for weight in weights:
        weight.register_post_accumulate_grad_hook(reduce)
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        for weight, shard in zip(weights, shards, strict=True):
            unflat(ctx.comm.all_gather(shard), [weight])
    ### END SOLUTION


# %% checks
WIDTHS = (6, *[8] * 7, 3)
SAMPLES, STEPS = 12, 2
GRADS = "bytes of gradients"
OPTIMIZER = "bytes of optimizer states"
SENT = "bytes that a rank sends, on a ring"


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the model's weights after the answer has trained it."""
    assert callable(answer)
    model = serial.model(case.seed, WIDTHS)
    mine = [serial.share(batch, ctx.rank, ctx.world_size) for batch in serial.batches(case, SAMPLES, STEPS)]
    with Memory(ctx, model.parameters()):
        answer(ctx, model, mine, serial.adam)
    return serial.weights(model)


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the weights that serial training gives."""
    model, data = serial.model(case.seed, WIDTHS), serial.batches(case, SAMPLES, STEPS)
    return [serial.train(model, data, optimizer=serial.adam)["weights"]] * case.ranks


def shard_bytes(case: Case) -> int:
    """Return the bytes of the n-ths of all parameters that a rank has."""
    return sum(-(-weight.numel() // case.ranks) * 8 for weight in serial.model(0, WIDTHS).parameters())


EXERCISE = OnRanks(
    solution=zero_2,
    cases=(Case(2, seed=21), Case(3, seed=22), Case(4, seed=23)),
    play=play,
    expected=expected,
    result=f"the weights after {STEPS} steps",
    budgets=(
        Budget(OPTIMIZER, peak("optimizer"), lambda case: 2 * shard_bytes(case), "bytes"),
        Budget(GRADS, peak("grads"), lambda case: shard_bytes(case) + 3 * max(WIDTHS) ** 2 * 8, "bytes"),
        Budget(SENT, ring, lambda case: STEPS * 2 * (case.ranks - 1) * shard_bytes(case), "bytes"),
        Budget("collectives", collectives, STEPS * 2 * 2 * (len(WIDTHS) - 1)),
    ),
    after="03-zero",
    place=30,
    start="Make a shard of each parameter, and an optimizer of the shards. Then write the hook: it takes a parameter "
    "whose gradient has just been made, gives its shard the mean of all ranks' n-ths, and frees the gradient.",
    mistakes=(
        Mistake(
            "hooks-in-the-loop",
            (
                "The first step works, the second does not. How many hooks does a parameter have by then?",
                "A hook stays. One that is registered in every step is called once for each step so far, and the "
                "second call finds no gradient any more. Register them once, before the loop.",
            ),
            [
                (
                    "    for weight in weights:\n        weight.register_post_accumulate_grad_hook(reduce)\n",
                    "",
                ),
                (
                    "    for x, y in batches:\n",
                    "    for x, y in batches:\n        for weight in weights:\n"
                    "            weight.register_post_accumulate_grad_hook(reduce)\n",
                ),
            ],
            when=lambda seen: "AssertionError" in seen.error or "NoneType" in seen.error,
        ),
        Mistake(
            "reduces-after-the-backward",
            (
                "The result is right. How many whole gradients are there when the backward ends?",
                "What is reduced after the backward was all there at its end. And a gradient is freed only when "
                "nothing refers to it any more, `weight.grad` included.",
                "In the hook: reduce-scatter `weight.grad`, then `weight.grad = None`.",
            ),
            [
                (
                    "    for weight in weights:\n        weight.register_post_accumulate_grad_hook(reduce)\n",
                    "",
                ),
                (
                    ".backward()\n",
                    ".backward()\n        for weight in weights:\n            reduce(weight)\n",
                ),
            ],
            when=lambda seen: seen.budget == GRADS,
        ),
        Mistake(
            "all-reduces-the-gradients",
            (
                "Which part of what a rank receives does it keep?",
                "An all-reduce gives everybody the sum of everything, and sends twice what a reduce-scatter sends.",
                "`ctx.comm.reduce_scatter(flat([weight.grad], n))` gives this rank's n-th of the sum.",
            ),
            [
                (
                    "ctx.comm.reduce_scatter(flat([weight.grad], n)) / n",
                    "ctx.comm.all_reduce(flat([weight.grad], n)).chunk(n)[ctx.rank] / n",
                )
            ],
            when=lambda seen: seen.budget == SENT,
        ),
        Mistake(
            "whole-optimizer",
            (
                "What does the optimizer of a rank hold two means of?",
                "It holds them of all that it was given: give it the shards, not the model's parameters.",
            ),
            [
                (
                    "    optimizer = make_optimizer(shards)",
                    "    shards = [flat([weight], 1).clone() for weight in weights]\n"
                    "    shard_of = dict(zip(weights, shards, strict=True))\n    optimizer = make_optimizer(shards)",
                ),
                (
                    "ctx.comm.reduce_scatter(flat([weight.grad], n)) / n",
                    'ctx.comm.all_reduce(flat([weight.grad], 1), op="mean")',
                ),
                ("unflat(ctx.comm.all_gather(shard), [weight])", "unflat(shard, [weight])"),
            ],
            when=lambda seen: seen.budget == OPTIMIZER,
        ),
        Mistake(
            "summed-not-averaged",
            (
                "A reduce-scatter adds up the gradients of n ranks. What is the gradient of the batch's mean loss?",
                "The mean of the ranks' gradients: divide by n.",
            ),
            [("(flat([weight.grad], n)) / n", "(flat([weight.grad], n))")],
        ),
        Mistake(
            "gradients-pile-up",
            (
                "The first step is right. What does the second backward add to?",
                "A backward adds to `weight.grad`. If that is still there from the step before, it counts again: "
                "`weight.grad = None` in the hook, which is what frees it as well.",
            ),
            [("        weight.grad = None\n", "")],
        ),
        Mistake(
            "no-all-gather",
            (
                "Whose parameters does the model of a rank compute with in the second step?",
                "A rank updates its n-ths only, and the model needs all: all-gather each shard after the step.",
            ),
            [("unflat(ctx.comm.all_gather(shard), [weight])", "unflat(torch.cat([shard] * n), [weight])")],
        ),
    ),
    otherwise=(
        "Take one step on 2 ranks, and print each shard's gradient: it has to be this rank's n-th of the mean.",
        "Take two steps: if only the second is wrong, something of the first is still there, or was not gathered.",
    ),
)

"""Cut a matrix by rows.

A linear layer Y = XA + bias on n ranks. Now each rank has some of A's *rows*, and the columns of X that meet them: just
what a layer that was cut by columns leaves it with. What it computes has the size of all of Y, and is one part of a
sum:

    X [b, k₀ | k₁]  ·  A [k₀, m]   =   X₀A₀ + X₁A₁   =   Y [b, m]
                         [k₁, m]       rank 0  rank 1

Megatron-LM's operator *g* stands where Y leaves: an all-reduce in the forward, nothing in the backward. (The gradient
of Y is the same on every rank, and each needs all of it.) The bias is whole on every rank.

`operator(x, forward, backward)` is a tensor whose value is `forward(x)`, and whose backward gives x the gradient
`backward(dy)`.

Budget: one collective, of the size of Y.

Source: Shoeybi et al. 2019, section 3, figure 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.tensor_parallel import operator
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, payload
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def row_parallel(ctx: mk.Context, x: Tensor, a: Tensor, bias: Tensor) -> Tensor:
    """Return Y = XA + bias, [b, m], the same on every rank.

    x: [b, k_i], this rank's columns of X. a: [k_i, m], its rows of A; ranks may have more or fewer. bias: [m], all of
    it.
    """

    def g(y: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        return operator(y, lambda y: ctx.comm.all_reduce(y), lambda dy: dy)
        ### END SOLUTION

    ### BEGIN SOLUTION
    return g(x @ a) + bias
    ### END SOLUTION


# %% checks
ROWS, M = 4, 5
SENT = "bytes of collectives"


def whole(case: Case) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Return each rank's columns of X and rows of A, the bias, and the gradient of Y."""
    generator = case.generator(5)
    sizes = [2 + (rank + case.seed) % 3 for rank in range(case.ranks)]
    xs = [torch.randn(ROWS, size, generator=generator, dtype=torch.float64) for size in sizes]
    parts = [torch.randn(size, M, generator=generator, dtype=torch.float64) for size in sizes]
    bias = torch.randn(M, generator=generator, dtype=torch.float64)
    return xs, parts, bias, torch.randn(ROWS, M, generator=generator, dtype=torch.float64)


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run this rank's forward and backward with the answer."""
    assert callable(answer)
    xs, parts, bias, dy = whole(case)
    x, a, bias = xs[ctx.rank].requires_grad_(), parts[ctx.rank].requires_grad_(), bias.requires_grad_()
    y = answer(ctx, x, a, bias)
    y.backward(dy)
    return {"y": y.detach(), "gradient of x": x.grad, "gradient of a": a.grad, "gradient of bias": bias.grad}


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the same, computed on one device."""
    xs, parts, bias, dy = whole(case)
    sizes = [part.shape[0] for part in parts]
    x, a = torch.cat(xs, 1).requires_grad_(), torch.cat(parts).requires_grad_()
    bias.requires_grad_()
    y = x @ a + bias
    of_x, of_a, of_bias = torch.autograd.grad(y, (x, a, bias), dy)
    return [
        {"y": y.detach(), "gradient of x": dx, "gradient of a": da, "gradient of bias": of_bias}
        for dx, da in zip(of_x.split(sizes, 1), of_a.split(sizes), strict=True)
    ]


EXERCISE = OnRanks(
    solution=row_parallel,
    cases=(Case(2, seed=21), Case(3, seed=22), Case(4, seed=23)),
    play=play,
    expected=expected,
    result="Y and gradients",
    budgets=(Budget("collectives", collectives, 1), Budget(SENT, payload, ROWS * M * 8, "bytes")),
    after="06-tensor-parallel",
    place=20,
    start="`x @ a` has the shape of Y already. What is it, compared with Y, and what has to happen to it?",
    mistakes=(
        Mistake(
            "bias-on-every-rank",
            (
                "By how much is Y too large? Look at one column, and at its bias.",
                "Every rank adds the bias to its part of the sum, and then the parts are added up: the bias is there "
                "n times. Add it once, after g.",
            ),
            [("g(x @ a) + bias", "g(x @ a + bias)")],
        ),
        Mistake(
            "all-reduce-in-the-backward-too",
            (
                "Y is right. By which factor are the gradients of x and a too large?",
                "The gradient of Y is the same on every rank: it is whole already, and not a part of a sum. Adding "
                "it up makes it n times as large. g does nothing in the backward.",
            ),
            [("lambda dy: dy", "lambda dy: ctx.comm.all_reduce(dy)")],
        ),
        Mistake(
            "no-g",
            (
                "Is Y the same on every rank?",
                "Each rank has a part of the sum X₀A₀ + X₁A₁ + ..., and nobody has added the parts up.",
                "g is `operator(y, lambda y: ctx.comm.all_reduce(y), lambda dy: dy)`, and the layer `g(x @ a) + "
                "bias`.",
            ),
            [("g(x @ a) + bias", "x @ a + bias")],
        ),
        Mistake(
            "averaged-not-summed",
            (
                "By which factor is Y too small, the bias apart?",
                "The ranks do not have other samples, they have other terms of one sum. A sum is not divided by n.",
            ),
            [("ctx.comm.all_reduce(y)", 'ctx.comm.all_reduce(y, op="mean")')],
        ),
        Mistake(
            "f-instead-of-g",
            (
                "Where is Y to be added up: when it leaves the layer, or when its gradient comes back?",
                "You wrote f: that belongs where X enters a layer that is cut by columns. g is its conjugate: what "
                "the one does in the forward the other does in the backward.",
            ),
            [
                (
                    "lambda y: ctx.comm.all_reduce(y), lambda dy: dy",
                    "lambda y: y, lambda dy: ctx.comm.all_reduce(dy)",
                )
            ],
        ),
        Mistake(
            "puts-whole-matrices-together",
            (
                "How many bytes travel for one Y?",
                "Gathering parts of X or A sends more than the layer has to, and then every rank does all of the "
                "work. Multiply what you have, and add up the results.",
            ),
            [("g(x @ a) + bias", "g(x @ a) + bias + 0 * ctx.comm.all_gather((x @ a).detach())[: len(x)]")],
            when=lambda seen: seen.budget,
        ),
    ),
    otherwise=("Print `x @ a` on 2 ranks, add them up by hand, and compare with X A on one rank.",),
)

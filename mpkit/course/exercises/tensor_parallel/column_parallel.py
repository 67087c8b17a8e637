"""Cut a matrix by columns.

A linear layer Y = XA on n ranks. Every rank has all of X, and some of A's columns. So each has the same columns of Y,
and nothing has to be sent in the forward:

    X [b, h]  ·  A [h, k₀ | k₁ | k₂]   =   Y [b, k₀ | k₁ | k₂]
                   rank  0    1    2         rank 0    1    2

In the backward each rank has the gradient of its own columns of Y. What it computes for X from that is one part of a
sum: ∂X = ∂Y₀ A₀ᵀ + ∂Y₁ A₁ᵀ + ... Megatron-LM's operator *f* stands where X enters: it does nothing in the forward,
and an all-reduce in the backward.

Write f, and the layer. `operator(x, forward, backward)` is a tensor whose value is `forward(x)`, and whose backward
gives x the gradient `backward(dy)`.

Budget: one collective, of the size of X.

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
def column_parallel(ctx: mk.Context, x: Tensor, a: Tensor) -> Tensor:
    """Return this rank's columns of Y = XA, [b, k_i].

    x: [b, h], the same on every rank. a: [h, k_i], this rank's columns of A; ranks may have more or fewer.
    After `y.backward(...)`, x.grad has to be the gradient of all of Y, the same on every rank.
    """

    def f(x: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        return operator(x, lambda x: x, lambda dx: ctx.comm.all_reduce(dx))
        ### END SOLUTION

    ### BEGIN SOLUTION
    return f(x) @ a
    ### END SOLUTION


# %% checks
ROWS, H = 4, 5
SENT = "bytes of collectives"


def whole(case: Case) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return X, each rank's columns of A, and the gradients of each rank's columns of Y."""
    generator = case.generator(5)
    x = torch.randn(ROWS, H, generator=generator, dtype=torch.float64)
    parts = [torch.randn(H, 2 + r, generator=generator, dtype=torch.float64) for r in range(case.ranks)]
    grads = [torch.randn(ROWS, 2 + r, generator=generator, dtype=torch.float64) for r in range(case.ranks)]
    return x, parts, grads


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run this rank's forward and backward with the answer."""
    assert callable(answer)
    x, parts, grads = whole(case)
    x, a = x.requires_grad_(), parts[ctx.rank].requires_grad_()
    y = answer(ctx, x, a)
    y.backward(grads[ctx.rank])
    return {"y": y.detach(), "gradient of x": x.grad, "gradient of a": a.grad}


def expected(case: Case) -> list[dict[str, Tensor | None]]:
    """Return the same, computed with all columns on one device."""
    x, parts, grads = whole(case)
    a = torch.cat(parts, 1).requires_grad_()
    x.requires_grad_()
    y = x @ a
    y.backward(torch.cat(grads, 1))
    sizes = [part.shape[1] for part in parts]
    assert a.grad is not None
    return [
        {"y": of_y, "gradient of x": x.grad, "gradient of a": of_a}
        for of_y, of_a in zip(y.detach().split(sizes, 1), a.grad.split(sizes, 1), strict=True)
    ]


EXERCISE = OnRanks(
    solution=column_parallel,
    cases=(Case(2, seed=11), Case(3, seed=12), Case(4, seed=13)),
    play=play,
    expected=expected,
    result="Y and gradients",
    budgets=(Budget("collectives", collectives, 1), Budget(SENT, payload, ROWS * H * 8, "bytes")),
    after="06-tensor-parallel",
    place=10,
    start="Write the forward without f first: `x @ a` is this rank's part of Y. What is then missing in `x.grad`?",
    mistakes=(
        Mistake(
            "no-f",
            (
                "Y is right. Is the gradient of X the same on every rank?",
                "Each rank computes ∂X from its own columns of Y. These are parts of a sum over ranks, and nobody "
                "has added them up.",
                "f is `operator(x, lambda x: x, lambda dx: ctx.comm.all_reduce(dx))`, and the layer `f(x) @ a`.",
            ),
            [("f(x) @ a", "x @ a")],
        ),
        Mistake(
            "averaged-not-summed",
            (
                "By which factor is the gradient of X too small?",
                "All ranks have the same samples; they have different columns. Their gradients of X are parts of one "
                "sum, so nothing is divided by n. (In data parallelism it is the samples that differ.)",
            ),
            [("all_reduce(dx)", 'all_reduce(dx, op="mean")')],
        ),
        Mistake(
            "all-reduce-in-the-forward",
            (
                "What is X multiplied by, on 2 ranks?",
                "X is the same on every rank already. An all-reduce in the forward makes it n times as large. f does "
                "nothing there, and its all-reduce in the backward.",
            ),
            [
                (
                    "lambda x: x, lambda dx: ctx.comm.all_reduce(dx)",
                    "lambda x: ctx.comm.all_reduce(x), lambda dx: dx",
                )
            ],
        ),
        Mistake(
            "gradient-of-the-columns-summed",
            (
                "Whose columns does the gradient of `a` belong to?",
                "Every rank has other columns of A: their gradients have nothing to do with each other, and often "
                "not even the same shape. Only X is shared.",
                "Let f stand before X, not before a.",
            ),
            [("return f(x) @ a", "return f(x) @ f(a)")],
            when=lambda seen: seen.mismatch or seen.hang,
        ),
        Mistake(
            "sums-twice",
            (
                "By which factor is the gradient of X too large?",
                "It has been added up over ranks twice. One all-reduce is enough.",
            ),
            [("ctx.comm.all_reduce(dx))", "ctx.comm.all_reduce(ctx.comm.all_reduce(dx)))")],
        ),
    ),
    otherwise=(
        "Print Y and x.grad on 2 ranks, and compare with all columns on one: which of the two is wrong?",
    ),
)

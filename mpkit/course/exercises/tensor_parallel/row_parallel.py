"""Cut a matrix by rows."""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.tensor_parallel import operator
from mpkit.course.framework.exercise import Answer, Budget, Case
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


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run this rank's forward and backward with the answer."""
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
    when={
        "puts-whole-matrices-together": lambda seen: seen.budget,
    },
)

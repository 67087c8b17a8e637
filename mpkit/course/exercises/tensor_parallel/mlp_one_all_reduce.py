"""The MLP with one all-reduce.

The MLP of a transformer is two linear layers with a GeLU between: Z = GeLU(XA + a) B + b. Cut A by columns, and B by
rows:

    X ──f── X A₀ ── GeLU ── (·) B₀ ──┐
                                     g ── + b ── Z
    X ──f── X A₁ ── GeLU ── (·) B₁ ──┘

Columns of XA meet just the same rows of B, and GeLU works on each number by itself. So nothing has to be sent between
the two layers: one all-reduce in the forward (g), one in the backward (f).

You get the whole layers, as the serial model has them, and compute with this rank's part of each. Mind how torch keeps
them: `nn.Linear.weight` is [out, in], and `F.linear(x, weight, bias)` is x weightᵀ + bias. The gradient then falls into
your part of `weight.grad`, and leaves the rest zero. Which n-th a rank takes is up to you, as long as each number
between the layers is computed by one rank.

Source: Shoeybi et al. 2019, section 3, figure 3a.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.exercises.tensor_parallel import operator
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, payload
from mpkit.course.framework.on_ranks import OnRanks


# %% given
def f(ctx: mk.Context, x: Tensor) -> Tensor:
    """Apply Megatron's f: the identity in the forward, an all-reduce in the backward."""
    return operator(x, lambda x: x, lambda dx: ctx.comm.all_reduce(dx))


def g(ctx: mk.Context, y: Tensor) -> Tensor:
    """Apply Megatron's g: an all-reduce in the forward, the identity in the backward."""
    return operator(y, lambda y: ctx.comm.all_reduce(y), lambda dy: dy)


# %% answer
def mlp(ctx: mk.Context, x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """Compute `down(F.gelu(up(x)))`, [b, h] -> [b, h], an n-th on each rank; the result is the same on every rank.

    up: [h -> k], down: [k -> h], whole on every rank; n divides k. Use an n-th of both, this rank's.
    """
    ### BEGIN SOLUTION
    n, r = ctx.world_size, ctx.rank
    a, a_bias = up.weight.chunk(n, 0)[r], up.bias.chunk(n)[r]
    b = down.weight.chunk(n, 1)[r]
    y = F.gelu(F.linear(f(ctx, x), a, a_bias))
    return g(ctx, F.linear(y, b)) + down.bias
    ### END SOLUTION


# %% checks
ROWS, H, K = 4, 5, 12
CUT = ("gradient of up.weight", "gradient of up.bias", "gradient of down.weight")
WORKED = "numbers between the layers that a rank computes"
CALLS, SENT = "collectives, of forward and backward together", "bytes of collectives"
Linears = tuple[nn.Linear, nn.Linear]


def whole(case: Case) -> tuple[Tensor, Tensor, Linears]:
    """Return X, the gradient of Z, and both layers."""
    generator = case.generator(5)
    x, dz = torch.randn(2, ROWS, H, generator=generator, dtype=torch.float64)
    up, down = nn.Linear(H, K, dtype=torch.float64), nn.Linear(K, H, dtype=torch.float64)
    for parameter in (*up.parameters(), *down.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), dz, (up, down)


def gradients(x: Tensor, layers: Linears) -> dict[str, Tensor | None]:
    """Return the gradients by name."""
    up, down = layers
    return {
        "gradient of x": x.grad,
        "gradient of up.weight": up.weight.grad,
        "gradient of up.bias": up.bias.grad,
        "gradient of down.weight": down.weight.grad,
        "gradient of down.bias": down.bias.grad,
    }


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run this rank's forward and backward with the answer."""
    assert callable(answer)
    x, dz, layers = whole(case)
    z = answer(ctx, x, *layers)
    z.backward(dz)
    return {"z": z.detach(), **gradients(x, layers)}


def expected(case: Case) -> list[dict[str, Tensor | None]]:
    """Return the results of the serial MLP, and how many numbers between the layers are a rank's."""
    x, dz, (up, down) = whole(case)
    z = down(torch.nn.functional.gelu(up(x)))
    z.backward(dz)
    return [{"z": z.detach(), **gradients(x, (up, down)), WORKED: K // case.ranks}] * case.ranks


def together(case: Case, results: list[dict[str, Tensor]]) -> list[dict[str, object]]:
    """Add up the gradients of what is cut, over ranks; count the numbers between the layers that a rank computes."""
    cut = {name: sum(one[name] for one in results) for name in CUT}
    rows = [
        (one["gradient of up.weight"] != 0).any(1) | (one["gradient of down.weight"] != 0).any(0)
        for one in results
    ]
    return [{**one, **cut, WORKED: int(row.sum())} for one, row in zip(results, rows, strict=True)]


EXERCISE = OnRanks(
    solution=mlp,
    cases=(Case(2, seed=31), Case(3, seed=32), Case(4, seed=33)),
    play=play,
    expected=expected,
    together=together,
    result="Z and gradients, those of cut weights added up over ranks",
    budgets=(
        Budget(CALLS, collectives, 2),
        Budget(SENT, payload, 2 * ROWS * H * 8, "bytes"),
    ),
    after="06-tensor-parallel",
    place=30,
    start="Take this rank's part of each weight first, and print its shape. A by columns is `up.weight` by rows, "
    "because torch keeps it transposed: `up.weight.chunk(n, 0)[r]`.",
    mistakes=(
        Mistake(
            "gathers-between-the-layers",
            (
                "What does the second layer need of the first one's result, if B is cut by rows?",
                "You put all of GeLU(XA) together before the second layer. But a rank's rows of B meet only the "
                "columns that the same rank has: nothing has to be sent there.",
                "`F.linear(y, b)` with this rank's y and this rank's part of `down.weight`, then g.",
            ),
            [
                (
                    "    return g(ctx, F.linear(y, b))",
                    "    ctx.comm.all_gather(y.detach())\n    return g(ctx, F.linear(y, b))",
                )
            ],
            when=lambda seen: seen.budget,
        ),
        Mistake(
            "rows-then-columns",
            (
                "What does GeLU do with a part of a sum?",
                "If A is cut by rows, each rank has a part of the sum XA, and GeLU(u + v) is not GeLU(u) + GeLU(v). "
                "By columns each rank has all of some numbers.",
                "A by columns: `up.weight.chunk(n, 0)[r]`. B by rows: `down.weight.chunk(n, 1)[r]`.",
            ),
            """
            def mlp(ctx: mk.Context, x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
                n, r = ctx.world_size, ctx.rank
                sizes = [len(part) for part in torch.arange(x.shape[1]).tensor_split(n)]
                a = up.weight.split(sizes, 1)[r]
                y = F.gelu(F.linear(f(ctx, x).split(sizes, 1)[r], a, up.bias / n))
                return g(ctx, F.linear(y, down.weight)) + down.bias
            """,
        ),
        Mistake(
            "no-f",
            (
                "Z is right. Which gradient is wrong, and is it the same on every rank?",
                "Each rank's gradient of X comes from its own columns of A: a part of a sum. f, where X enters, adds "
                "the parts up in the backward.",
                "`F.linear(f(ctx, x), a, a_bias)`",
            ),
            [("f(ctx, x)", "x")],
        ),
        Mistake(
            "bias-added-n-times",
            (
                "By how much is Z too large?",
                "Of the second layer each rank has a part of a sum, and the bias is no part of it: add it once, "
                "after g.",
                "`g(ctx, F.linear(y, b)) + down.bias`",
            ),
            [("g(ctx, F.linear(y, b)) + down.bias", "g(ctx, F.linear(y, b, down.bias))")],
        ),
        Mistake(
            "no-g",
            (
                "Is Z the same on every rank?",
                "Each rank has one term of the sum Y₀B₀ + Y₁B₁ + ...: g adds them up.",
            ),
            [("g(ctx, F.linear(y, b))", "F.linear(y, b)")],
        ),
        Mistake(
            "wrong-dimension-of-the-weight",
            (
                "Which shapes do the two matrices have that torch could not multiply?",
                "`nn.Linear.weight` is [out, in], the transposed of the paper's matrix. The paper's columns of A are "
                "the rows of `up.weight` (dimension 0), its rows of B the columns of `down.weight` (dimension 1).",
            ),
            [("down.weight.chunk(n, 1)", "down.weight.chunk(n, 0)")],
            when=lambda seen: "shapes cannot be multiplied" in seen.error or "size of tensor" in seen.error,
        ),
        Mistake(
            "does-everything-everywhere",
            (
                "Whose part of the weights does each rank compute with?",
                "All ranks do the whole MLP: the result is right, and nothing is shared. The gradient should fall "
                "into this rank's part only.",
            ),
            """
            def mlp(ctx: mk.Context, x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
                return down(F.gelu(up(x)))
            """,
        ),
    ),
    otherwise=("Check Z on 2 ranks first, then the gradient of x, and those of the weights last.",),
)

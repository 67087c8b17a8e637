"""Sequence parallel.

Between the tensor-parallel regions there are layer norms, dropouts and residuals. They work on each token by itself,
and in tensor parallelism every rank does all tokens, and keeps all their activations. Divide these by tokens:

    x [s/t] ── norm ── f̄ ──── A_i ── GeLU ── B_i ──── ḡ ── + x      a rank's part of the sequence
                    all-gather                  reduce-scatter
                        [s] tokens, some columns

f̄ stands where f did: all-gather in the forward, reduce-scatter in the backward. ḡ stands where g did: reduce-scatter
in the forward, all-gather in the backward. Together they send what two all-reduces send.

One thing is new: weight and bias of the layer norm are the same on every rank, but each rank now uses them on *its own*
tokens. So their gradients are parts of a sum over ranks: `f(ctx, parameter)` adds them up.

`operator(x, forward, backward)` has the value `forward(x)`, and gives x the gradient `backward(dy)`.

Budget: bytes sent, as in tensor parallelism (and a little for the layer norm), and bytes of activations.

Source: Korthikanti et al., MLSys 2023, section 4.2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.exercises.tensor_parallel import operator
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, ring
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.trace import Kind


# %% given
def f(ctx: mk.Context, x: Tensor) -> Tensor:
    """Apply Megatron's f: the identity in the forward, an all-reduce in the backward."""
    return operator(x, lambda x: x, lambda dx: ctx.comm.all_reduce(dx))


# %% answer
def sequence_parallel(
    ctx: mk.Context, x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """Return this rank's part of X + GeLU(norm(X) A) B, [s/t, batch, h].

    x: [s/t, batch, h], its part of the sequence. weight, bias: [h], of the layer norm, the same on every rank.
    a: [h, k_i], its columns of A. b: [k_i, h], its rows of B.
    """

    def f_bar(x: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        return operator(x, lambda x: ctx.comm.all_gather(x), lambda dy: ctx.comm.reduce_scatter(dy))
        ### END SOLUTION

    def g_bar(y: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        return operator(y, lambda y: ctx.comm.reduce_scatter(y), lambda dz: ctx.comm.all_gather(dz))
        ### END SOLUTION

    ### BEGIN SOLUTION
    normed = F.layer_norm(x, x.shape[-1:], f(ctx, weight), f(ctx, bias))
    return x + g_bar(F.gelu(f_bar(normed) @ a) @ b)
    ### END SOLUTION


# %% checks
LENGTH, BATCH, H = 24, 2, 6
WHOLE = LENGTH * BATCH * H * 8
CALLS, SENT, HELD = (
    "collectives",
    "bytes that a rank sends, on a ring",
    "bytes of activations kept for the backward",
)


def inputs(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """Return the whole input and parameters, by name, and the gradient of the result."""
    generator = case.generator(5)
    shapes = {
        "x": (LENGTH, BATCH, H),
        "weight": (H,),
        "bias": (H,),
        "a": (H, case.ranks),
        "b": (case.ranks, H),
    }
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    return weights, torch.randn(LENGTH, BATCH, H, generator=generator, dtype=torch.float64)


def part(name: str, tensor: Tensor, case: Case, rank: int) -> Tensor:
    """Return the part of a whole tensor that a rank has."""
    if name in ("weight", "bias"):
        return tensor.clone()
    return tensor.chunk(case.ranks, 1 if name == "a" else 0)[rank].clone()


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run this rank's forward and backward with the answer."""
    assert callable(answer)
    whole, dz = inputs(case)
    mine = {name: part(name, each, case, ctx.rank).requires_grad_() for name, each in whole.items()}
    of_mine = part("x", dz, case, ctx.rank)
    saved: dict[int, int] = {}  # bytes, by storage

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        z = answer(ctx, *mine.values())
    for each in mine.values():
        saved.pop(each.untyped_storage().data_ptr(), None)
    with ctx.record.span("backward", nbytes=sum(saved.values())):
        z.backward(of_mine)
    return {"result": z.detach(), **{f"gradient of {name}": each.grad for name, each in mine.items()}}


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return each rank's part of the same, computed on one device."""
    whole, dz = inputs(case)
    x, weight, bias, a, b = (each.requires_grad_() for each in whole.values())
    z = x + F.gelu(F.layer_norm(x, (H,), weight, bias) @ a) @ b
    grads = torch.autograd.grad(z, (x, weight, bias, a, b), dz)
    return [
        {
            "result": part("x", z.detach(), case, rank),
            **{
                f"gradient of {name}": part(name, grad, case, rank)
                for name, grad in zip(whole, grads, strict=True)
            },
        }
        for rank in range(case.ranks)
    ]


def kept(seen: Seen) -> float:
    """Return the bytes of activations that the fullest rank saves for its backward."""
    assert seen.trace is not None
    return max(float(rank.ops["bytes"][rank.ops["kind"] == Kind.COMPUTE].max()) for rank in seen.trace.ranks)


def sent(case: Case) -> float:
    """Return the bytes to send: four times the whole sequence, and two all-reduces of [h]."""
    return (4 * WHOLE + 4 * H * 8) * (case.ranks - 1) / case.ranks


EXERCISE = OnRanks(
    solution=sequence_parallel,
    cases=(Case(2, seed=61), Case(3, seed=62), Case(4, seed=63)),
    play=play,
    expected=expected,
    result="result and gradients",
    budgets=(
        Budget(CALLS, collectives, 6),
        Budget(SENT, ring, sent, "bytes"),
        Budget(HELD, kept, lambda case: (1.3 + 2 / case.ranks) * WHOLE, "bytes"),
    ),
    after="06-tensor-parallel",
    place=60,
    start="Write f_bar and g_bar first: each is one collective in the forward, and the other one in the backward. "
    "Then the block, from left to right in the drawing.",
    mistakes=(
        Mistake(
            "norm-of-the-whole-sequence",
            (
                "How many tokens does a rank norm, and how many inputs of the norm does it keep for the backward?",
                "If the sequence is gathered before the norm, every rank does all tokens again, and keeps all of "
                "them. Norm this rank's tokens, and gather after that.",
                "`f_bar(normed)`, with `normed` made from this rank's x.",
            ),
            [
                ("F.layer_norm(x, x.shape", "F.layer_norm(f_bar(x), x.shape"),
                ("f_bar(normed) @ a", "normed @ a"),
            ],
            when=lambda seen: seen.budget == HELD,
        ),
        Mistake(
            "all-reduce-and-cut",
            (
                "Of the sum that a rank receives, how much does it keep?",
                "An all-reduce sends everybody the sums of all tokens, and a rank keeps those of its own. A "
                "reduce-scatter hands them out by token, for half of the bytes.",
                "g_bar is `operator(y, lambda y: ctx.comm.reduce_scatter(y), lambda dz: ctx.comm.all_gather(dz))`.",
            ),
            [
                (
                    "lambda y: ctx.comm.reduce_scatter(y)",
                    "lambda y: ctx.comm.all_reduce(y).chunk(ctx.world_size)[ctx.rank].clone()",
                )
            ],
            when=lambda seen: seen.budget == SENT,
        ),
        Mistake(
            "norm-of-own-tokens-only",
            (
                "The result is right. Which gradients are wrong, and are they the same on every rank?",
                "Weight and bias of the norm are used on other tokens by every rank. Their gradients are parts of a "
                "sum, and nobody has added them up: the copies on the ranks drift apart.",
                "`F.layer_norm(x, x.shape[-1:], f(ctx, weight), f(ctx, bias))`",
            ),
            [("f(ctx, weight), f(ctx, bias)", "weight, bias")],
        ),
        Mistake(
            "cuts-in-the-backward",
            (
                "The result is right. Of what is the gradient that comes back to f_bar a part?",
                "Each rank's gradient of the gathered tokens comes through its own columns of A only. It is a part "
                "of a sum: to take this rank's tokens of it is not enough.",
                "The conjugate of an all-gather is a reduce-scatter: it adds up, and hands out.",
            ),
            [
                (
                    "lambda dy: ctx.comm.reduce_scatter(dy)",
                    "lambda dy: dy.chunk(ctx.world_size)[ctx.rank].clone()",
                )
            ],
        ),
        Mistake(
            "residual-before-the-sum",
            (
                "By how much is the result too large?",
                "What goes into the reduce-scatter is added up over ranks. The residual is not a part of a sum: add "
                "x after it.",
            ),
            [
                (
                    "x + g_bar(F.gelu(f_bar(normed) @ a) @ b)",
                    "g_bar(F.gelu(f_bar(normed) @ a) @ b + ctx.comm.all_gather(x.detach())) + 0 * x",
                )
            ],
        ),
        Mistake(
            "averaged-not-summed",
            (
                "By which factor is the sum too small?",
                "Ranks have other columns and rows, not other samples: the parts are added up, and nothing is "
                "divided by t.",
            ),
            [
                (
                    "lambda y: ctx.comm.reduce_scatter(y)",
                    "lambda y: ctx.comm.reduce_scatter(y) / ctx.world_size",
                )
            ],
        ),
        Mistake(
            "no-gather",
            (
                "Whose tokens does a rank's part of A see?",
                "A rank has some of A's columns, and they have to see all tokens. If each rank sends only its own "
                "through, the others' columns are missing for them.",
            ),
            """
            def sequence_parallel(
                ctx: mk.Context, x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor
            ) -> Tensor:
                normed = F.layer_norm(x, x.shape[-1:], f(ctx, weight), f(ctx, bias))
                return x + F.gelu(normed @ a) @ b
            """,
        ),
    ),
    otherwise=("Check the result first, then the gradient of x, then those of the norm's weight and bias.",),
)

"""Clip by the true global norm.

Gradients are clipped by the norm of *all* of them together: if it is larger than `max_norm`, every gradient is
multiplied by `max_norm / norm`; if not, they stay as they are. In ZeRO-2 and -3 no rank has all of them. It has

    shards    its n-th of each large gradient: other numbers on every rank
    copies    the gradients of small parameters that are not sharded: the same numbers on every rank

Compute the norm over everything, each gradient counted once, and clip in place. All ranks have to come to the same
norm: if each clips by its own, they take steps of different lengths, and training is wrong without any error.

Budget: one collective, of one number.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, payload
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen


# %% answer
def clip_by_norm(ctx: mk.Context, shards: list[Tensor], copies: list[Tensor], max_norm: float) -> Tensor:
    """Clip all gradients in place, and return the norm that they had, one number, the same on every rank.

    shards: gradients of which this rank has an n-th, [k_i]. copies: those that every rank has whole, [...].
    """
    ### BEGIN SOLUTION
    squares = torch.stack([shard.square().sum() for shard in shards]).sum()
    squares = ctx.comm.all_reduce(squares)
    squares = squares + sum(copy.square().sum() for copy in copies)
    norm = squares.sqrt()
    if norm > max_norm:
        for grad in shards + copies:
            grad *= max_norm / norm
    return norm
    ### END SOLUTION


# %% checks
SENT = "bytes of collectives"
SHAPES = ((12, 6), (5, 12))
SMALL = ((7,), (3, 2))


def whole(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Return the large gradients, which are sharded, and the small ones, which are copied."""
    generator = case.generator(99)
    large = [torch.randn(shape, generator=generator, dtype=torch.float64).flatten() for shape in SHAPES]
    small = [2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SMALL]
    large[0] *= torch.linspace(0.1, 3, len(large[0]))  # so that ranks' parts differ
    return large, small


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the norm, and this rank's gradients after clipping."""
    assert callable(answer)
    large, copies = whole(case)
    shards = [grad.chunk(case.ranks)[ctx.rank].clone() for grad in large]
    norm = answer(ctx, shards, copies, case["max_norm"])
    return {"norm": norm, "shards": shards, "copies": copies}


def expected(case: Case) -> list[dict[str, object]]:
    """Return what torch's own clipping gives with all gradients on one device."""
    large, small = whole(case)
    held = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in large + small]
    for parameter, grad in zip(held, large + small, strict=True):
        parameter.grad = grad
    norm = torch.nn.utils.clip_grad_norm_(held, case["max_norm"])
    return [
        {"norm": norm, "shards": [grad.chunk(case.ranks)[rank] for grad in large], "copies": small}
        for rank in range(case.ranks)
    ]


def norm_of(seen: Seen, counted: int) -> bool:
    """Return whether the norm is the one in which each copy counts `counted` times."""
    large, small = whole(seen.case)
    squares = sum(float(grad.square().sum()) for grad in large)
    squares += counted * sum(float(grad.square().sum()) for grad in small)
    return seen.got is not None and abs(float(seen.got[0]["norm"]) - squares**0.5) < 1e-6


EXERCISE = OnRanks(
    solution=clip_by_norm,
    cases=(
        Case(2, seed=61, sizes={"max_norm": 2.0}),
        Case(3, seed=62, sizes={"max_norm": 100.0}),
        Case(4, seed=63, sizes={"max_norm": 0.5}),
    ),
    play=play,
    expected=expected,
    result="norm and gradients",
    budgets=(Budget("collectives", collectives, 1), Budget(SENT, payload, 8, "bytes")),
    after="03-zero",
    place=70,
    start="A norm is the square root of a sum of squares. Which sums can each rank make alone, and which of them has "
    "to be added up over ranks?",
    mistakes=(
        Mistake(
            "norm-of-own-shard",
            (
                "Is the norm the same on every rank?",
                "Each rank clips by the norm of what it has. That is smaller than the norm of all, and another on "
                "every rank: shards of one gradient are multiplied by different numbers.",
                "Add up the squares of the shards over ranks, with an all-reduce, before the square root.",
            ),
            [("    squares = ctx.comm.all_reduce(squares)\n", "")],
        ),
        Mistake(
            "adds-up-norms",
            (
                "The norm is too large. What do you add up over ranks?",
                "Norms do not add up, squares do: √(a² + b²) is not a + b.",
                "All-reduce the sum of squares, and take the root at the very end.",
            ),
            [
                ("ctx.comm.all_reduce(squares)", "ctx.comm.all_reduce(squares.sqrt()).square()"),
            ],
        ),
        Mistake(
            "copies-counted-n-times",
            (
                "How often is a gradient counted that all ranks have?",
                "The copies are the same numbers on every rank. In a sum over ranks they come n times. Count them "
                "once: after the all-reduce.",
            ),
            [
                (
                    "    squares = ctx.comm.all_reduce(squares)\n    squares = squares + sum(copy.square().sum() for "
                    "copy in copies)\n",
                    "    squares = squares + sum(copy.square().sum() for copy in copies)\n"
                    "    squares = ctx.comm.all_reduce(squares)\n",
                )
            ],
            when=lambda seen: norm_of(seen, seen.case.ranks),
        ),
        Mistake(
            "copies-left-out",
            (
                "Which gradients does the global norm belong to?",
                "All of them: small parameters that are not sharded count too.",
            ),
            [("    squares = squares + sum(copy.square().sum() for copy in copies)\n", "")],
            when=lambda seen: norm_of(seen, 0),
        ),
        Mistake(
            "always-scales",
            (
                "Look at the case whose `max_norm` is larger than the norm. What happens to its gradients?",
                "Clipping only ever makes gradients smaller. If the norm is below `max_norm` they stay as they are.",
                "`if norm > max_norm:`, or multiply by `min(1, max_norm / norm)`.",
            ),
            [("    if norm > max_norm:\n", "    if norm > 0:\n")],
        ),
        Mistake(
            "a-collective-a-gradient",
            (
                "How many numbers have to travel, and in how many messages?",
                "Every small all-reduce costs its latency, and the ranks wait for each. Add up first, at home, then "
                "once over ranks.",
            ),
            [
                (
                    "torch.stack([shard.square().sum() for shard in shards]).sum()",
                    "sum(ctx.comm.all_reduce(shard.square().sum()) for shard in shards)",
                ),
                ("    squares = ctx.comm.all_reduce(squares)\n", ""),
            ],
            when=lambda seen: seen.budget == "collectives",
        ),
        Mistake(
            "gathers-the-gradients",
            (
                "How many bytes of gradients does the norm need on one rank?",
                "You put whole gradients together to take their norm: that is what stage 2 was to avoid. A rank's "
                "squares add up to one number.",
            ),
            [
                (
                    "    squares = torch.stack([shard.square().sum() for shard in shards]).sum()\n"
                    "    squares = ctx.comm.all_reduce(squares)\n",
                    "    squares = ctx.comm.all_gather(torch.cat(shards)).square().sum()\n",
                )
            ],
            when=lambda seen: seen.budget == SENT,
        ),
        Mistake(
            "copies-not-clipped",
            (
                "The norm is right, and the shards too. What about the others?",
                "What counts in the norm is clipped with it: shards and copies.",
            ),
            [("for grad in shards + copies:", "for grad in shards:")],
        ),
    ),
    otherwise=(
        "Print the sum of squares on each rank, of shards and of copies, and add them up by hand for 2 ranks.",
        "First get the norm right. If that is, look at what you multiply, and when.",
    ),
)

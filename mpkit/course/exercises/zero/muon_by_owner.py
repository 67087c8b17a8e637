"""A step of Muon whose states are divided by owner."""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import payload
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks


# %% given
def orthogonal(M: Tensor) -> Tensor:
    """Return M made orthogonal, about: its singular values become 1 (Newton and Schulz). It needs the whole matrix."""
    X = M / M.norm()
    for _ in range(8):
        X = 1.5 * X - 0.5 * X @ X.mT @ X
    return X


# %% answer
def step(
    ctx: mk.Context, weights: list[Tensor], grads: list[Tensor], momenta: dict[int, Tensor], owners: list[int]
) -> None:
    """Take a step of Muon, in place: momentum = 0.9 momentum + gradient, weight -= 0.1 orthogonal(momentum).

    weights: the matrices, whole and the same on every rank. grads: of this rank's samples.
    momenta: by the number of a matrix; this rank has those that it owns. owners: the rank that owns each matrix.
    """
    ### BEGIN SOLUTION
    for i, (weight, grad, owner) in enumerate(zip(weights, grads, owners, strict=True)):
        total = ctx.comm.reduce(grad, owner)
        if ctx.rank == owner:
            momenta[i].mul_(0.9).add_(total / ctx.world_size)
            weight.sub_(0.1 * orthogonal(momenta[i]))
        weight.copy_(ctx.comm.broadcast(weight, owner))
    ### END SOLUTION


# %% checks
SENT = "bytes of collectives"
SHAPES = ((6, 4), (3, 5), (4, 4), (5, 2), (2, 6))
BYTES = 8 * sum(rows * columns for rows, columns in SHAPES)


def owners_of(case: Case) -> list[int]:
    """Return the rank that owns each matrix."""
    return [(case["first"] + 2 * i) % case.ranks for i in range(len(SHAPES))]


def matrices(case: Case, salt: int) -> list[Tensor]:
    """Return matrices in the shapes of the weights, the same in every process."""
    generator = case.generator(salt)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the weights after two steps, and the momenta that this rank has."""
    weights, owners = matrices(case, 50), owners_of(case)
    momenta = {i: m for i, m in enumerate(matrices(case, 60)) if owners[i] == ctx.rank}
    for number in range(2):
        answer(ctx, weights, matrices(case, 10 * number + ctx.rank), momenta, owners)
    return {"weights": weights, "momenta": momenta}


def expected(case: Case) -> list[dict[str, object]]:
    """Take the steps on one device."""
    weights, momenta, owners = matrices(case, 50), matrices(case, 60), owners_of(case)
    for number in range(2):
        every = [matrices(case, 10 * number + rank) for rank in range(case.ranks)]
        for i, (weight, momentum) in enumerate(zip(weights, momenta, strict=True)):
            momentum.mul_(0.9).add_(torch.stack([grads[i] for grads in every]).mean(0))
            weight.sub_(0.1 * orthogonal(momentum))
    return [
        {"weights": weights, "momenta": {i: m for i, m in enumerate(momenta) if owners[i] == rank}}
        for rank in range(case.ranks)
    ]


def holds_more(seen: Seen) -> bool:
    """Return whether a rank has momenta that are not its own."""
    return seen.got is not None and any(
        len(got["momenta"]) > len(right["momenta"])
        for got, right in zip(seen.got, seen.expected, strict=True)
    )


EXERCISE = OnRanks(
    solution=step,
    cases=(Case(2, 71, {"first": 0}), Case(3, 72, {"first": 1}), Case(4, 73, {"first": 2})),
    play=play,
    expected=expected,
    result="weights and momenta",
    budgets=(Budget(SENT, payload, 2 * 2 * BYTES, "bytes"),),
    after="03-zero",
    place=25,
    when={
        "momenta-on-every-rank": holds_more,
        "gradients-to-all": lambda seen: seen.budget == SENT,
    },
)

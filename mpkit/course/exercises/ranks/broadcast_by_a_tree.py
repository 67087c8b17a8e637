"""Broadcast by a tree."""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import collectives, messages
from mpkit.course.framework.observation import MACHINE, Seen
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.devices.catalogue import hardware
from mpkit.trace import Kind


# %% answer
def broadcast(ctx: mk.Context, tensor: Tensor, src: int) -> Tensor:
    """Broadcast rank `src`'s tensor to every rank, in place.

    tensor: (k,), of the same length on every rank; only what `src` has in it matters. Returns it.
    """
    ### BEGIN SOLUTION
    n = ctx.world_size
    place = (ctx.rank - src) % n  # src is at place 0
    have = 1  # so many places have the tensor
    while have < n:
        if place < have and place + have < n:
            ctx.comm.send(tensor, (ctx.rank + have) % n)
        elif have <= place < 2 * have:
            ctx.comm.recv(tensor, (ctx.rank - have) % n)
        have *= 2
    return tensor
    ### END SOLUTION


# %% checks
LENGTH = 2**19
"""2 MiB: much longer on the wire than the link's latency."""

SPAN = "time until the last rank has it"


def given(case: Case, rank: int) -> Tensor:
    """Return a rank's tensor, a different one on each rank."""
    return torch.randn(LENGTH, generator=case.generator(rank))


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run the answer with this rank's tensor."""
    tensor = given(case, ctx.rank)
    received = answer(ctx, tensor, case["src"])
    return {"returned": sample(received), "in place": sample(tensor)}


def sample(received: object) -> object:
    """Return some of the elements: comparing all takes longer."""
    return received[:: LENGTH // 64].clone() if isinstance(received, Tensor) else received


def expected(case: Case) -> list[dict[str, object]]:
    """Return `src`'s tensor for all ranks."""
    right = sample(given(case, case["src"]))
    return [{"returned": right, "in place": right}] * case.ranks


def rounds(case: Case) -> int:
    """Return how often the number of ranks that have the tensor has to double."""
    return (case.ranks - 1).bit_length()


def star(seen: Seen) -> bool:
    """Return whether one rank has sent to all others."""
    return seen.budget == SPAN and messages(seen) == seen.case.ranks - 1


def chain(seen: Seen) -> bool:
    """Return whether no rank has sent to more than one other."""
    return seen.budget == SPAN and messages(seen) == 1


EXERCISE = OnRanks(
    solution=broadcast,
    cases=(
        Case(2, 1, {"src": 0}),
        Case(3, 2, {"src": 2}),
        Case(4, 3, {"src": 1}),
        Case(5, 4, {"src": 0}),
        Case(8, 5, {"src": 3}),
    ),
    play=play,
    expected=expected,
    result="the tensor",
    budgets=(
        Budget("collectives", collectives, 0),
        Budget(
            SPAN,
            lambda seen: seen.timeline.step_time,
            lambda case: rounds(case) * hardware(MACHINE).link.time(Kind.SEND, 4 * LENGTH),
            "seconds",
        ),
    ),
    after="02-data-parallel",
    place=30,
    when={
        "uses-a-collective": lambda seen: seen.budget == "collectives",
        "star": star,
        "chain": chain,
        "into-a-copy": lambda seen: seen.close(
            [
                {**right, "in place": one["in place"]}
                for right, one in zip(seen.expected, seen.got, strict=True)
            ]
        ),
        "partner-beyond-the-end": lambda seen: (
            "never received it" in seen.hang or "that is this rank itself" in seen.error
        ),
    },
)

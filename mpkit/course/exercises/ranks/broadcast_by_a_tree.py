"""Broadcast by a tree.

Rank `src` has a tensor that all others need. It could send it to one after the other (a **star**), or every rank could
pass it on to the next (a **chain**): both take n-1 messages' time. But whoever has the tensor already can help: after
the first round two ranks have it, after the second four, after the third eight. A **binomial tree** needs log₂(n)
rounds, rounded up.

```text
    round 1      0 → 1
    round 2      0 → 2      1 → 3
    round 3      0 → 4      1 → 5      2 → 6      3 → 7
```

Write it with `ctx.comm.send(tensor, dst)` and `ctx.comm.recv(buffer, src)`. The number of ranks need not be a power of
two, and `src` need not be rank 0: count ranks from `src` on. On the virtual clock the last rank has to have the tensor
after as many messages' time as there are rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, messages
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import MACHINE, Seen
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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer with this rank's tensor."""
    assert callable(answer)
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
    start="Forget `src` at first and let it be 0. In the round in which 1, 2, 4, ... ranks have the tensor: which "
    "ranks send, which receive, and how far apart are the two?",
    mistakes=(
        Mistake(
            "uses-a-collective",
            (
                "That works, and it is what you would do at work. How does it do it?",
                "`ctx.comm.broadcast` is what you are to write here: use send and recv only.",
            ),
            """
            def broadcast(ctx: mk.Context, tensor: Tensor, src: int) -> Tensor:
                return ctx.comm.broadcast(tensor, src)
            """,
            when=lambda seen: seen.budget == "collectives",
        ),
        Mistake(
            "star",
            (
                "Look at the timeline: what do the ranks do that have the tensor already?",
                "One rank sends all the messages, and has only one way out: they leave one after the other. A rank "
                "that has received can send as well.",
                "In each round every rank that has the tensor sends it to one that has not: rank r to r + 1, then "
                "to r + 2, then to r + 4.",
            ),
            """
            def broadcast(ctx: mk.Context, tensor: Tensor, src: int) -> Tensor:
                if ctx.rank != src:
                    return ctx.comm.recv(tensor, src)
                for rank in range(ctx.world_size):
                    if rank != src:
                        ctx.comm.send(tensor, rank)
                return tensor
            """,
            when=star,
        ),
        Mistake(
            "chain",
            (
                "Look at the timeline: how many messages are under way at the same time?",
                "Each rank passes the tensor on once and is done: one message at a time, n-1 of them. A rank could "
                "go on sending, to ranks that are further away.",
                "In each round every rank that has the tensor sends it to one that has not: rank r to r + 1, then "
                "to r + 2, then to r + 4.",
            ),
            """
            def broadcast(ctx: mk.Context, tensor: Tensor, src: int) -> Tensor:
                n = ctx.world_size
                if ctx.rank != src:
                    ctx.comm.recv(tensor, (ctx.rank - 1) % n)
                if (ctx.rank + 1) % n != src:
                    ctx.comm.send(tensor, (ctx.rank + 1) % n)
                return tensor
            """,
            when=chain,
        ),
        Mistake(
            "into-a-copy",
            (
                "What you return is right. What does the tensor hold that was passed to you?",
                "The tensor of this rank is to be filled, in place: receive into it, not into a copy.",
            ),
            [("    n = ctx.world_size\n", "    tensor = tensor.clone()\n    n = ctx.world_size\n")],
            when=lambda seen: seen.close(
                [
                    {**right, "in place": one["in place"]}
                    for right, one in zip(seen.expected, seen.got, strict=True)
                ]
            ),
        ),
        Mistake(
            "from-rank-0",
            (
                "The ranks have a tensor. Whose?",
                "You take rank 0 for the root. Here the root is `src`, which may be any rank.",
                "Give each rank a place, `(ctx.rank - src) % n`: src is at place 0. Decide by places, send to ranks.",
            ),
            [("place = (ctx.rank - src) % n", "place = ctx.rank")],
        ),
        Mistake(
            "a-round-too-few",
            (
                "Some ranks still have their own tensor. How many rounds are there for so many ranks?",
                "After k rounds 2^k ranks have it. With 3 ranks one round is not enough: the number of rounds is "
                "rounded up.",
                "Go on while fewer than n ranks have the tensor: `while have < n`.",
            ),
            [("while have < n:", "while 2 * have <= n:")],
        ),
        Mistake(
            "partner-beyond-the-end",
            (
                "With a power of two it works. With 3 ranks, whom does the second one send to in round 2?",
                "A tree over a number of ranks that is no power of two has branches missing: a rank whose partner "
                "does not exist sends nothing in this round.",
                "Ask both: has this place the tensor (`place < have`), and is there a partner (`place + have < n`)?",
            ),
            [("if place < have and place + have < n:", "if place < have:")],
            when=lambda seen: "never received it" in seen.hang or "that is this rank itself" in seen.error,
        ),
    ),
    otherwise=(
        "Draw the rounds for 5 ranks and src=0, with an arrow for each message, and compare with what yours does: "
        "print the rank, the round and the partner.",
    ),
)

"""Pass a token round a ring.

Rank 0 has a number. It goes from rank to rank, each adds its own rank to it, and it comes back to rank 0:
0 → 1 → ... → n-1 → 0. Every rank returns the number as it had it last.

`ctx.comm.send(tensor, dst)` and `ctx.comm.recv(buffer, src)` are all you need; both wait until it is done.
Nobody promises that a message waits somewhere in between: think about who sends first.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, messages
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def pass_the_token(ctx: mk.Context, token: Tensor) -> Tensor:
    """Pass `token` once round the ring; each rank but 0 adds its rank to it.

    token: one number; rank 0's is the one that goes round. Returns it as this rank had it last.
    """
    ### BEGIN SOLUTION
    before, after = (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size
    if ctx.rank == 0:
        ctx.comm.send(token, after)
        ctx.comm.recv(token, before)
    else:
        ctx.comm.recv(token, before)
        token += ctx.rank
        ctx.comm.send(token, after)
    return token
    ### END SOLUTION


# %% checks
def given(case: Case, rank: int) -> Tensor:
    """Return a rank's number, a different one on each rank."""
    return torch.randint(100, (1,), generator=case.generator(rank))


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer with this rank's number."""
    assert callable(answer)
    return answer(ctx, given(case, ctx.rank))


def expected(case: Case) -> list[Tensor]:
    """Return each rank's token: ranks 1 to r have been added on rank r, all of them on rank 0."""
    start = given(case, 0)
    return [start + sum(range(1, (rank or case.ranks - 1) + 1)) for rank in range(case.ranks)]


EXERCISE = OnRanks(
    solution=pass_the_token,
    cases=(Case(2, seed=1), Case(3, seed=2), Case(4, seed=3)),
    play=play,
    expected=expected,
    result="the token",
    budgets=(
        Budget("messages that a rank sends", messages, 1),
        Budget("collectives", collectives, 0),
    ),
    after="01-pipeline-bubbles",
    place=20,
    start="First say who your neighbours are: the one before is `(ctx.rank - 1) % ctx.world_size`. Then write what "
    "rank 0 does, and what all others do: who has to send before it can receive anything?",
    mistakes=(
        Mistake(
            "buffer-of-another-dtype",
            (
                "The report says what was sent, and what the buffer is. What does `torch.zeros(1)` hold, and what is "
                "the token?",
                "A message is bytes: nobody converts them on the way. The buffer has the dtype and the shape of what "
                "is sent, and the token is int64.",
                "Receive into `token` itself, or into `torch.empty_like(token)`.",
            ),
            [
                (
                    "ctx.comm.recv(token, before)\n        token +=",
                    "token = ctx.comm.recv(torch.zeros(1), before)\n        token +=",
                )
            ],
            when=lambda seen: seen.mismatch,
        ),
        Mistake(
            "all-receive-first",
            (
                "Every rank waits in a receive. Who is to send first?",
                "The token starts on rank 0: that one has to send before it receives; the others the other way "
                "round.",
                "`if ctx.rank == 0:` send, then receive; `else:` receive, add, send.",
            ),
            """
            def pass_the_token(ctx: mk.Context, token: Tensor) -> Tensor:
                ctx.comm.recv(token, (ctx.rank - 1) % ctx.world_size)
                token += ctx.rank
                ctx.comm.send(token, (ctx.rank + 1) % ctx.world_size)
                return token
            """,
            when=lambda seen: "never sent it" in seen.hang,
        ),
        Mistake(
            "all-send-first",
            (
                "Every rank waits in a send. Who is to receive?",
                "A send is complete when the other side receives, and here nobody comes to it. Besides, only rank 0 "
                "has the token in the beginning: what do the others send?",
                "`if ctx.rank == 0:` send, then receive; `else:` receive, add, send.",
            ),
            """
            def pass_the_token(ctx: mk.Context, token: Tensor) -> Tensor:
                ctx.comm.send(token, (ctx.rank + 1) % ctx.world_size)
                ctx.comm.recv(token, (ctx.rank - 1) % ctx.world_size)
                token += ctx.rank
                return token
            """,
            when=lambda seen: seen.hang and "has finished" not in seen.hang and "never sent" not in seen.hang,
        ),
        Mistake(
            "nobody-closes-the-ring",
            (
                "The last rank sends, and nobody receives. What comes after rank n-1?",
                "Rank 0 has to receive the token in the end: from rank n-1, which is `(0 - 1) % n`.",
            ),
            [("        ctx.comm.recv(token, before)\n    else", "    else")],
            when=lambda seen: "never received it" in seen.hang,
        ),
        Mistake(
            "adds-after-it-sent",
            (
                "The token comes round, and is too small. When does a rank add to it?",
                "What a rank adds after it has sent the token stays at home: receive, add, send.",
            ),
            [
                ("        token += ctx.rank\n", ""),
                (
                    "send(token, after)\n    return",
                    "send(token, after)\n        token += ctx.rank\n    return",
                ),
            ],
        ),
        Mistake(
            "sends-its-own-number",
            (
                "Which number goes round, rank 0's, or each rank's own?",
                "You receive into a buffer, and go on with this rank's own number. Only what has come is the token.",
                "`ctx.comm.recv(token, before)` puts what comes into `token`; add to that.",
            ),
            [
                (
                    "ctx.comm.recv(token, before)\n        token +=",
                    "ctx.comm.recv(token.clone(), before)\n        token +=",
                )
            ],
        ),
        Mistake(
            "adds-one",
            (
                "Look at the token of a case with 2 ranks and of one with 3: what does each rank add?",
                "A rank adds its own number, `ctx.rank`, not 1.",
            ),
            [("token += ctx.rank", "token += 1")],
        ),
    ),
    otherwise=(
        "Follow the token on paper, with 3 ranks: which rank has it, what does it do with it, who is next?",
    ),
)

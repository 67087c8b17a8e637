"""Hang: neighbours.

A long sequence is cut among the ranks, in order, and a convolution of width 3 goes over it. At the border of its part a
rank needs one column from the rank before and one from the rank after. The sequence is a ring: before its first column
comes its last.

```text
    rank 0         rank 1         rank 2
    a b c d        e f g h        i j k l
  l         e    d         i    h         a      what each needs besides
```

Messages between neighbours are all it takes, and all that is allowed: each rank sends its first and its last column
once, and no collective, which would bring every border to every rank.

The program below waits for ever. **Check it as it is, and read the report**: what does each rank do, and could any of
them go on? Then mend it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import calls, collectives, messages, payload, sent_bytes
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.trace import Kind


# %% answer
def convolve(ctx: mk.Context, conv: nn.Conv1d, part: Tensor) -> Tensor:
    """Return this rank's part of the convolution of the whole sequence.

    conv: of width 3, without padding, equal on all ranks. part: (channels, k), this rank's columns. Returns (out, k).
    """
    before, after = (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size
    first, last = part[:, :1].contiguous(), part[:, -1:].contiguous()
    from_before, from_after = torch.empty_like(last), torch.empty_like(first)
    ### BEGIN SOLUTION
    # instead: ctx.comm.send(last, after, tag="R0")
    # instead: ctx.comm.send(first, before, tag="L0")
    # instead: ctx.comm.recv(from_before, before, tag="R0")
    # instead: ctx.comm.recv(from_after, after, tag="L0")
    sends = [ctx.comm.isend(last, after, tag="R0"), ctx.comm.isend(first, before, tag="L0")]
    ctx.comm.recv(from_before, before, tag="R0")
    ctx.comm.recv(from_after, after, tag="L0")
    for send in sends:
        send.wait()
    ### END SOLUTION
    whole: Tensor = conv(torch.cat([from_before, part, from_after], dim=1))
    return whole.detach()


# %% checks
def given(case: Case) -> tuple[nn.Conv1d, Tensor]:
    """Return a convolution and the whole sequence, the same on every rank."""
    conv = nn.Conv1d(2, 2, 3).double()
    generator = case.generator()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return conv, torch.randn(2, 5 * case.ranks, generator=generator, dtype=torch.float64)


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer with this rank's part."""
    assert callable(answer)
    conv, whole = given(case)
    return answer(ctx, conv, whole.chunk(case.ranks, 1)[ctx.rank].contiguous())


def expected(case: Case) -> list[Tensor]:
    """Return each rank's part of the convolution of the whole sequence."""
    conv, whole = given(case)
    return list(conv(F.pad(whole, (1, 1), mode="circular")).detach().chunk(case.ranks, 1))


def all_in(kind: str) -> Callable[[Seen], bool]:
    """Return a test of whether every rank waits in communication of this kind."""
    return lambda seen: all(f"rank {rank} waits in {kind} " in seen.hang for rank in range(seen.case.ranks))


BLOCKING = (
    (
        'sends = [ctx.comm.isend(last, after, tag="R0"), ctx.comm.isend(first, before, tag="L0")]',
        'ctx.comm.send(last, after, tag="R0")\n    ctx.comm.send(first, before, tag="L0")',
    ),
    ("    for send in sends:\n        send.wait()\n", ""),
)
"""What turns the solution back into the program that hangs."""

EXERCISE = OnRanks(
    solution=convolve,
    cases=(Case(3, 1), Case(4, 2), Case(2, 3)),
    play=play,
    expected=expected,
    result="its part of the convolution",
    budgets=(
        Budget("collectives", collectives, 0),
        Budget("bytes that a rank sends", sent_bytes, 2 * 2 * 8, "bytes"),
    ),
    after="01-pipeline-bubbles",
    place=20,
    start="Check the program as it is, and read the report: who waits, in what, and for whom?",
    mistakes=(
        Mistake(
            "a-barrier",
            (
                "Look at the report: the barrier is behind them, and in what do they wait now?",
                "A barrier makes the ranks meet, and that is all. After it all of them send, as before, and none "
                "comes to its receive.",
                "Start both sends with `isend`, receive, and wait for the sends afterwards.",
            ),
            [*BLOCKING, ("ctx.comm.send(last", "ctx.comm.barrier()\n    ctx.comm.send(last")],
            when=lambda seen: seen.hang and calls(Kind.BARRIER)(seen) > 0,
        ),
        Mistake(
            "crossed-sends",
            (
                "In what does every rank wait, and what would the rank on the other side have to do? When does it "
                "come to that?",
                "All of them send, and a send is complete only when the other side receives. Each would receive in "
                "its third line, and none gets there: the sends are crossed.",
                "Start both sends with `isend`, then receive, then wait for the sends. Or let every second rank "
                "receive first.",
            ),
            [*BLOCKING],
            when=all_in("send"),
        ),
        Mistake(
            "tags-that-do-not-match",
            (
                "The report names the tag of each message. Which tag does the sender give it, and which the "
                "receiver?",
                "A message is found by its tag: what goes to the right has R0 on both ends, what goes to the left "
                "L0.",
            ),
            [
                ('recv(from_before, before, tag="R0")', 'recv(from_before, before, tag="L0")'),
                ('recv(from_after, after, tag="L0")', 'recv(from_after, after, tag="R0")'),
            ],
            when=lambda seen: "never sent it" in seen.hang and messages(seen) > 0,
        ),
        Mistake(
            "crossed-receives",
            (
                "Now every rank waits in a receive. Who sends?",
                "You have turned it round: all receive first, and none comes to its send. One of the two has to be "
                "under way while the other is waited for.",
                "Start both sends with `isend` before the receives, and wait for them after.",
            ),
            """
            def convolve(ctx: mk.Context, conv: nn.Conv1d, part: Tensor) -> Tensor:
                before, after = (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size
                first, last = part[:, :1].contiguous(), part[:, -1:].contiguous()
                from_before, from_after = torch.empty_like(last), torch.empty_like(first)
                ctx.comm.recv(from_before, before, tag="R0")
                ctx.comm.recv(from_after, after, tag="L0")
                ctx.comm.send(last, after, tag="R0")
                ctx.comm.send(first, before, tag="L0")
                return conv(torch.cat([from_before, part, from_after], dim=1)).detach()
            """,
            when=all_in("recv"),
        ),
        Mistake(
            "zeros-at-the-border",
            (
                "It ends, and the middle of each part is right. What stands at its borders?",
                "Nothing is sent any more: each rank convolves its part as if there were zeros around it. The "
                "neighbours' columns are needed.",
            ),
            """
            def convolve(ctx: mk.Context, conv: nn.Conv1d, part: Tensor) -> Tensor:
                return conv(F.pad(part, (1, 1))).detach()
            """,
        ),
        Mistake(
            "its-own-border",
            (
                "It ends, and the middle of each part is right. Whose columns stand at its borders?",
                "Each rank takes its own columns for its neighbours': the part is a ring of its own.",
            ),
            """
            def convolve(ctx: mk.Context, conv: nn.Conv1d, part: Tensor) -> Tensor:
                return conv(F.pad(part, (1, 1), mode="circular")).detach()
            """,
        ),
        Mistake(
            "left-and-right",
            (
                "It ends, and the middle of each part is right. Which column goes to which side?",
                "The rank before needs your first column, the rank after your last one; you send them the other way "
                "round.",
            ),
            [("isend(last, after", "isend(first, after"), ("isend(first, before", "isend(last, before")],
        ),
        Mistake(
            "borders-to-everybody",
            (
                "It is right. How many ranks get a column, and how many need it?",
                "A gather of the borders brings all of them to every rank: with a thousand ranks two columns of two "
                "thousand are of use. Send each column to the one neighbour that needs it.",
            ),
            """
            def convolve(ctx: mk.Context, conv: nn.Conv1d, part: Tensor) -> Tensor:
                before, after = (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size
                borders = ctx.comm.all_gather(torch.stack([part[:, 0], part[:, -1]])[None])
                ends = borders[before][1][:, None], borders[after][0][:, None]
                return conv(torch.cat([ends[0], part, ends[1]], dim=1)).detach()
            """,
            when=lambda seen: seen.budget == "collectives" and payload(seen) <= seen.case.ranks * 2 * 2 * 8,
        ),
        Mistake(
            "everything-to-everybody",
            (
                "It is right. How much does a rank get that it does not need?",
                "An all_gather brings the whole sequence to every rank. Two columns are enough: one from either "
                "side.",
            ),
            """
            def convolve(ctx: mk.Context, conv: nn.Conv1d, part: Tensor) -> Tensor:
                k = part.shape[1]
                whole = ctx.comm.all_gather(part.t().contiguous()).t()
                return conv(F.pad(whole, (1, 1), mode="circular")).detach()[:, ctx.rank * k : (ctx.rank + 1) * k]
            """,
            when=lambda seen: seen.budget,
        ),
    ),
    otherwise=(
        "It is no longer the hang. For 3 ranks, write down which column has to be at either side of each part, and "
        "who has it.",
    ),
)

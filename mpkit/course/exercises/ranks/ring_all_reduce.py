"""Ring all-reduce.

Every rank has a tensor; in the end every rank has the sum of all of them. If each sent its tensor to all others, a rank
would send n-1 tensors. A ring does it with 2(n-1)/n tensors per rank, which is hardly 2, however many ranks there are.

Cut the tensor into n parts. Each rank only sends to the next one and receives from the one before, a part at a time:

```text
    reduce-scatter   n-1 steps: a part goes round the ring, and each rank adds its own to it;
                     then rank r has the whole sum of one part
    all-gather       n-1 steps: the finished parts go round once more, and are only copied

    3 ranks, step 1        rank 0            rank 1            rank 2
    sends (to the right)   part 0            part 1            part 2
    receives and adds to   part 2            part 0            part 1
```

Write it with `isend`, `irecv`, `send` and `recv`. The length need not be a multiple of n (`tensor.tensor_split(n)`
gives n parts, as equal as can be). If all ranks first send and then receive, all of them wait: start one of the two
with `isend` or `irecv`, and don't touch its buffer before `wait()`.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, messages, sent_bytes
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.trace import Kind


# %% answer
def all_reduce(ctx: mk.Context, tensor: Tensor) -> Tensor:
    """Replace every rank's tensor by the sum of all ranks' tensors, in place.

    tensor: (k,), of the same length on every rank; n need not divide k. Returns it.
    """
    ### BEGIN SOLUTION
    n, rank = ctx.world_size, ctx.rank
    before, after = (rank - 1) % n, (rank + 1) % n
    parts = tensor.tensor_split(n)  # views: what is written into them is written into the tensor
    # reduce-scatter
    for step in range(n - 1):
        mine, theirs = parts[(rank - step) % n], parts[(rank - step - 1) % n]
        buffer = torch.empty_like(theirs)
        arriving = ctx.comm.irecv(buffer, before)
        ctx.comm.send(mine, after)
        arriving.wait()
        theirs += buffer
    # all-gather
    for step in range(n - 1):
        mine, theirs = parts[(rank + 1 - step) % n], parts[(rank - step) % n]
        arriving = ctx.comm.irecv(theirs, before)
        ctx.comm.send(mine, after)
        arriving.wait()
    return tensor
    ### END SOLUTION


# %% checks
VOLUME = "bytes that a rank sends"


def given(case: Case, rank: int) -> Tensor:
    """Return a rank's tensor, a different one on each rank."""
    return torch.randint(1, 100, (case["length"],), generator=case.generator(rank)).double()


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer with this rank's tensor; return what is in it, if that is not what the answer returned."""
    assert callable(answer)
    tensor = given(case, ctx.rank)
    returned = answer(ctx, tensor)
    alike = isinstance(returned, Tensor) and returned.shape == tensor.shape
    return tensor if alike else returned


def expected(case: Case) -> list[Tensor]:
    """Return the sum for every rank."""
    return [torch.stack([given(case, rank) for rank in range(case.ranks)]).sum(0)] * case.ranks


def volume(case: Case) -> float:
    """Return 2(n-1)/n of the tensor's bytes if n divides its length; else count every part as long as the longest."""
    part = -(-int(case["length"]) // case.ranks)
    return 8 * 2 * (case.ranks - 1) * part


def reads_early(seen: Seen) -> bool:
    """Return whether the ranks finished with wrong sums, and some receive was not waited for at once."""
    assert seen.trace is not None
    late = False
    for rank in seen.trace.ranks:
        waits = {int(op["ref"]): at for at, op in enumerate(rank.ops) if op["kind"] == Kind.WAIT}
        receives = [at for at, op in enumerate(rank.ops) if op["kind"] == Kind.RECV]
        late |= any(waits.get(at) != at + 1 for at in receives)
    shapes = seen.is_finished and all(
        isinstance(got, Tensor) and got.shape == right.shape
        for got, right in zip(seen.got or (), seen.expected, strict=True)
    )
    return late and shapes and not seen.budget


def never_waits_for_sends(seen: Seen) -> bool:
    """Return whether something was sent with isend and never waited for.

    A send that a rank was in when another rank's error ended the run has no wait either, and is the rank's last call.
    """
    assert seen.trace is not None
    for rank in seen.trace.ranks:
        waited = {int(op["ref"]) for op in rank.ops if op["kind"] == Kind.WAIT}
        if any(op["kind"] == Kind.SEND and at not in waited for at, op in enumerate(rank.ops[:-1])):
            return not seen.budget
    return False


EXERCISE = OnRanks(
    solution=all_reduce,
    cases=(
        Case(3, 1, {"length": 6}),
        Case(2, 2, {"length": 8}),
        Case(4, 3, {"length": 4000}),
        Case(3, 4, {"length": 1000}),
        Case(4, 5, {"length": 5}),
    ),
    play=play,
    expected=expected,
    result="the sum, in place",
    budgets=(
        Budget("collectives", collectives, 0),
        Budget(VOLUME, sent_bytes, volume, "bytes"),
        Budget("messages that a rank sends", messages, lambda case: 2 * (case.ranks - 1)),
    ),
    after="02-data-parallel",
    place=40,
    start="Write the reduce-scatter first. In its first step rank r sends part r, and receives part r-1, to which "
    "it adds its own. That part is what it sends in the next step. So which part does it send in step s?",
    mistakes=(
        Mistake(
            "into-a-copy",
            (
                "After your function every rank's own tensor is as it was. Where is the sum?",
                "The sum is in a tensor of your own. The one that was given is to be replaced, in place: what is "
                "written into the views that `tensor_split` returns is written into it.",
            ),
            [
                (
                    "parts = tensor.tensor_split(n)",
                    "tensor = tensor.clone()\n    parts = tensor.tensor_split(n)",
                )
            ],
            when=lambda seen: seen.close([given(seen.case, rank) for rank in range(seen.case.ranks)]),
        ),
        Mistake(
            "uses-a-collective",
            (
                "The sum is right. Who did the work?",
                "The collectives of `ctx.comm` are what you are to write here: use isend, irecv, send and recv only.",
            ),
            """
            def all_reduce(ctx: mk.Context, tensor: Tensor) -> Tensor:
                return ctx.comm.all_reduce(tensor)
            """,
            when=lambda seen: seen.budget == "collectives",
        ),
        Mistake(
            "all-send-first",
            (
                "Every rank waits in a send. Who is to receive?",
                "A send is complete when the other side receives. Where all ranks of a ring send first, nobody ever "
                "comes to the receive.",
                "Start the receive first with `arriving = ctx.comm.irecv(buffer, before)`, then send, then "
                "`arriving.wait()`.",
            ),
            [
                (
                    "arriving = ctx.comm.irecv(buffer, before)\n        ctx.comm.send(mine, after)\n"
                    "        arriving.wait()",
                    "ctx.comm.send(mine, after)\n        ctx.comm.recv(buffer, before)",
                )
            ],
            when=lambda seen: seen.hang.count("waits in send to rank") >= 2 * seen.case.ranks,
        ),
        Mistake(
            "all-receive-first",
            (
                "Every rank waits in a receive. Who sends?",
                "All ranks wait for the one before, round the whole ring, and nobody comes to its send.",
                "Start the receive with `irecv`, send, and only then `wait()` for the receive.",
            ),
            [
                (
                    "ctx.comm.send(mine, after)\n        arriving.wait()",
                    "arriving.wait()\n        ctx.comm.send(mine, after)",
                )
            ],
            when=lambda seen: seen.hang.count("waits in recv from rank") >= 2 * seen.case.ranks,
        ),
        Mistake(
            "sends-not-waited-for",
            (
                "Who waits for the message that you start with isend?",
                "`isend` only starts it. If its rank is done and gone before the message has left, the other side "
                "waits for ever; and if the part changes before, something else is sent.",
                "Keep what `isend` returns, and call its `wait()` once the receive of the same step is complete.",
            ),
            [("ctx.comm.send(mine, after)", "ctx.comm.isend(mine, after)")],
            when=never_waits_for_sends,
        ),
        Mistake(
            "no-all-gather",
            (
                "Count the parts that are right on each rank.",
                "After the reduce-scatter each rank has one finished part, and pieces of the others. The finished "
                "parts have to go round once more.",
                "Write n-1 more steps: rank r has finished part r+1 and sends that first. What comes replaces what "
                "is there.",
            ),
            [
                (
                    "for step in range(n - 1):\n        mine, theirs = parts[(rank + 1",
                    "for step in range(0):\n        mine, theirs = parts[(rank + 1",
                )
            ],
        ),
        Mistake(
            "adds-in-the-all-gather",
            (
                "The sums are too large. What is added twice?",
                "In the second half the parts that come round are finished sums. They replace what a rank has; "
                "adding counts its own share again.",
                "Receive straight into the part, or copy: `theirs.copy_(buffer)`, not `+=`.",
            ),
            [
                (
                    "arriving = ctx.comm.irecv(theirs, before)\n        ctx.comm.send(mine, after)\n"
                    "        arriving.wait()",
                    "buffer = torch.empty_like(theirs)\n        arriving = ctx.comm.irecv(buffer, before)\n"
                    "        ctx.comm.send(mine, after)\n        arriving.wait()\n        theirs += buffer",
                )
            ],
        ),
        Mistake(
            "nothing-adds-up",
            (
                "Every number is some rank's own. Print the parts between the two halves: is one part on each rank "
                "the whole sum?",
                "If none is: in the first half a part collects on its way, and each rank adds what it has to what "
                "comes; yours replaces it. If one is: you begin the second half with another part, which is not "
                "finished.",
                "First half: receive into a buffer of its own, `torch.empty_like(part)`, then `part += buffer`. "
                "Second half: rank r has finished part r+1, so that one goes first.",
            ),
            [("theirs += buffer", "theirs.copy_(buffer)")],
        ),
        Mistake(
            "parts-by-floor",
            (
                "It works where n divides the length. Which numbers are wrong where it does not?",
                "`len(tensor) // n` is rounded down: what is left over at the end is in no part, and is never sent.",
                "`tensor.tensor_split(n)` makes n parts, of which the first ones are one longer.",
            ),
            [("parts = tensor.tensor_split(n)", "parts = tensor[: len(tensor) // n * n].view(n, -1)")],
        ),
        Mistake(
            "too-few-parts",
            (
                "How many parts do you get from 5 numbers for 4 ranks?",
                "`chunk(n)` rounds the length of a part up, and may then give fewer than n parts: 2 + 2 + 1. "
                "`tensor_split(n)` always gives n.",
            ),
            [("tensor.tensor_split(n)", "tensor.chunk(n)")],
            when=lambda seen: "IndexError" in seen.error,
        ),
        Mistake(
            "whole-tensors",
            (
                "The sum is right, and each rank sends too much. How long is one message?",
                "You send whole tensors round the ring: (n-1) of them. With n parts, a message is an n-th of the "
                "tensor, and 2(n-1) of them are enough.",
                "Cut with `tensor.tensor_split(n)`. All ranks work at the same time, each on another part.",
            ),
            """
            def all_reduce(ctx: mk.Context, tensor: Tensor) -> Tensor:
                n, passed = ctx.world_size, tensor.clone()
                for _ in range(n - 1):
                    buffer = torch.empty_like(tensor)
                    arriving = ctx.comm.irecv(buffer, (ctx.rank - 1) % n)
                    ctx.comm.send(passed, (ctx.rank + 1) % n)
                    passed = arriving.wait()
                    tensor += passed
                return tensor
            """,
            when=lambda seen: seen.budget == VOLUME,
        ),
        Mistake(
            "reads-before-wait",
            (
                "Check it once more: are the same numbers wrong? If not, it is a race: something is read before it "
                "is there.",
                "`irecv` only starts the receive. Until `wait()` has returned, anything may be in the buffer, and "
                "the delays of the ranks decide.",
                "Put `arriving.wait()` before the line that reads the buffer, in the same step.",
            ),
            [("arriving.wait()\n        theirs += buffer", "theirs += buffer\n        arriving.wait()")],
            when=reads_early,
        ),
    ),
    otherwise=(
        "Take 3 ranks and 3 numbers, write down on paper who has what after each step, and print the same in your "
        "loop.",
    ),
)

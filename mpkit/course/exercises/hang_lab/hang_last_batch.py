"""Hang: the last batch.

Data parallelism: all batches are dealt out to the ranks like cards, rank r takes batches r, r+n, r+2n and so on. In
each round every rank computes the gradient of its batch, and all step with the mean. In the last round there may be
fewer batches than ranks.

The program below waits for ever, but only on some numbers of batches. **Check it as it is, and read the report**: which
rank waits, in what, at which line, and what does the rank that it waits for? Then mend it. The mean of a round is the
mean over its batches, as many as there are; no batch may be left out and none used twice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks

Batch = tuple[Tensor, Tensor]


# %% answer
def train(ctx: mk.Context, model: nn.Linear, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Train for one pass over all batches; a round has up to as many batches as there are ranks.

    model: equal on all ranks. batches: all of them, the same list on each rank. Returns the weight after the last.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ### BEGIN SOLUTION
    # instead: for x, y in batches[ctx.rank :: ctx.world_size]:
    # instead:     loss = F.mse_loss(model(x), y)
    # instead:     optimizer.zero_grad()
    # instead:     loss.backward()
    # instead:     for parameter in model.parameters():
    # instead:         ctx.comm.all_reduce(parameter.grad, op="mean")
    # instead:     optimizer.step()
    for first in range(0, len(batches), ctx.world_size):
        deal = batches[first : first + ctx.world_size]
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # what a rank without a batch has to give
        if ctx.rank < len(deal):
            x, y = deal[ctx.rank]
            F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            ctx.comm.all_reduce(parameter.grad)
            parameter.grad /= len(deal)
        optimizer.step()
    ### END SOLUTION
    return model.weight.detach()


# %% checks
def given(case: Case) -> tuple[nn.Linear, list[Batch]]:
    """Return a model and batches, the same on every rank."""
    generator = case.generator()
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    draw = torch.randn(case["batches"], 4, 5, generator=generator, dtype=torch.float64)
    return model, [(each[:, :3], each[:, 3:]) for each in draw]


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer with the model and all batches."""
    assert callable(answer)
    return answer(ctx, *given(case))


def expected(case: Case) -> list[Tensor]:
    """Return the weight of serial training in which each round is one larger batch."""
    model, batches = given(case)
    for first in range(0, len(batches), case.ranks):
        deal = batches[first : first + case.ranks]
        loss = torch.stack([F.mse_loss(model(x), y) for x, y in deal]).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
    return [model.weight.detach()] * case.ranks


EXERCISE = OnRanks(
    solution=train,
    cases=(
        Case(2, 1, {"batches": 3}),
        Case(3, 2, {"batches": 4}),
        Case(3, 3, {"batches": 6}),
        Case(4, 4, {"batches": 7}),
    ),
    play=play,
    expected=expected,
    result="the weight",
    after="02-data-parallel",
    place=10,
    start="Check the program as it is, and read the report: who waits, in what, and for whom?",
    mistakes=(
        Mistake(
            "a-barrier",
            (
                "Look at the report: who waits in the barrier, and who waits in something else?",
                "A barrier is a collective like any other: all ranks have to come to it, as often. It makes no rank "
                "take part in an all_reduce that it never calls.",
                "Count how often each rank calls `all_reduce` in a pass. That has to be the same number on all.",
            ),
            """
            def train(ctx: mk.Context, model: nn.Linear, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for x, y in batches[ctx.rank :: ctx.world_size]:
                    loss = F.mse_loss(model(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    for parameter in model.parameters():
                        ctx.comm.all_reduce(parameter.grad, op="mean")
                    optimizer.step()
                    ctx.comm.barrier()
                return model.weight.detach()
            """,
            when=lambda seen: "barrier" in seen.hang,
        ),
        Mistake(
            "a-missing-rank",
            (
                "The report says that a rank never came to the all_reduce. What does it do instead, and how many "
                "batches had it?",
                "With 3 batches for 2 ranks, rank 0 has two and rank 1 has one. Rank 1 is done after one round, and "
                "rank 0 waits for it in the second. Every rank must take part in every round, with a batch or "
                "without one.",
                "Loop over rounds: `for first in range(0, len(batches), ctx.world_size)`. A rank that has no batch "
                "gives a gradient of zeros; divide the sum by the number of batches in the round.",
            ),
            """
            def train(ctx: mk.Context, model: nn.Linear, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for x, y in batches[ctx.rank :: ctx.world_size]:
                    loss = F.mse_loss(model(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    for parameter in model.parameters():
                        ctx.comm.all_reduce(parameter.grad, op="mean")
                    optimizer.step()
                return model.weight.detach()
            """,
            when=lambda seen: "never came to all_reduce" in seen.hang,
        ),
        Mistake(
            "drops-the-last-round",
            (
                "It ends. Which batches has it trained on?",
                "You leave out the round that is not full. That is a way to avoid the hang (PyTorch's sampler has "
                "drop_last for it), but here no batch may be left out.",
                "Go on to `len(batches)`, and let ranks without a batch give zeros.",
            ),
            [
                (
                    "range(0, len(batches), ctx.world_size)",
                    "range(0, len(batches) // ctx.world_size * ctx.world_size, ctx.world_size)",
                )
            ],
        ),
        Mistake(
            "counts-who-has-none",
            (
                "It ends, and full rounds are right. By what do you divide in the last one?",
                "A rank without a batch is counted in the mean, as if it had a gradient of zero. The mean of a "
                "round is over its batches.",
                "Sum with `ctx.comm.all_reduce(...)`, and divide by `len(deal)`, the number of batches in this "
                "round.",
            ),
            [("parameter.grad /= len(deal)", "parameter.grad /= ctx.world_size")],
        ),
        Mistake(
            "a-batch-twice",
            (
                "It ends. Which batch does a rank take that has none left?",
                "It takes one that was used before, so that batch counts twice. (PyTorch's DistributedSampler does "
                "just that, so that all ranks have as many.) Here none may be used twice.",
            ),
            [
                (
                    "if ctx.rank < len(deal):\n            x, y = deal[ctx.rank]\n            F",
                    "x, y = deal[ctx.rank % len(deal)]\n        F",
                ),
                ("parameter.grad /= len(deal)", "parameter.grad /= ctx.world_size"),
            ],
        ),
        Mistake(
            "nobody-communicates",
            (
                "It ends. Do the ranks still have the same weights?",
                "Without the all_reduce each rank trains on its own batches only. That is no data parallelism: the "
                "gradients have to be averaged in each round.",
            ),
            [
                (
                    "            ctx.comm.all_reduce(parameter.grad)\n            parameter.grad /= len(deal)\n",
                    "            pass\n",
                )
            ],
        ),
    ),
    otherwise=(
        "It is no longer the hang. Write down for 3 batches and 2 ranks which rank has which batch in which round, "
        "and what the gradient of each round has to be.",
    ),
)

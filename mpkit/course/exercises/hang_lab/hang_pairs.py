"""Hang: pairs.

Four ranks are two pipelines of two stages, side by side: ranks 0 and 1 have the first stage, ranks 2 and 3 the last
one. The pipelines are replicas, each with samples of its own.

```text
                  stage 0      stage 1
    replica 0     rank 0   →   rank 2
    replica 1     rank 1   →   rank 3
```

The last stage computes the loss, and its ranks average it over the replicas, to report it. Gradients are averaged over
the replicas of each stage. The program below waits for ever. **Check it as it is, and read the report**: of which ranks
is the collective in which somebody waits, and which of them ever call it? Then mend it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen


# %% answer
def train_step(ctx: mk.Context, stage: nn.Linear, x: Tensor, y: Tensor) -> dict[str, object]:
    """Run one forward and one backward of two pipelines.

    stage: this rank's, of d inputs and d outputs. x, y: (b, d), this replica's samples. Returns "loss", the mean over
    the replicas (None on the first stage), and "gradient", of this stage's weight, averaged over the replicas.
    """
    groups = [ctx.comm.group(ranks) for ranks in ([0, 1], [2, 3])]  # every rank makes all groups
    replicas = groups[ctx.rank // 2]  # the ranks that have the same stage as this one
    loss = None
    if ctx.rank < 2:
        hidden = stage(x)
        ctx.comm.send(hidden, ctx.rank + 2)
        hidden.backward(ctx.comm.recv(torch.empty_like(hidden), ctx.rank + 2))
    else:
        hidden = ctx.comm.recv(torch.empty_like(x), ctx.rank - 2).requires_grad_()
        loss = F.mse_loss(stage(hidden), y)
        loss.backward()
        ### BEGIN SOLUTION
        # instead: loss = ctx.comm.all_reduce(loss.detach(), op="mean")
        loss = ctx.comm.all_reduce(loss.detach(), replicas, op="mean")
        ### END SOLUTION
        ctx.comm.send(hidden.grad, ctx.rank - 2)
    gradient = ctx.comm.all_reduce(stage.weight.grad, replicas, op="mean")
    return {"loss": loss, "gradient": gradient}


# %% checks
def given(case: Case) -> tuple[list[nn.Linear], Tensor, Tensor]:
    """Return both stages, and the samples of both replicas."""
    generator = case.generator()
    stages = [nn.Linear(3, 3).double() for _ in range(2)]
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x, y = torch.randn(2, case["samples"], 3, generator=generator, dtype=torch.float64)
    return stages, x, y


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer with this rank's stage and its replica's samples."""
    assert callable(answer)
    stages, x, y = given(case)
    replica = ctx.rank % 2
    return answer(ctx, stages[ctx.rank // 2], x.chunk(2)[replica], y.chunk(2)[replica])


def expected(case: Case) -> list[dict[str, object]]:
    """Return the loss and the gradients of serial training with all samples."""
    stages, x, y = given(case)
    loss = F.mse_loss(nn.Sequential(*stages)(x), y)
    gradients = torch.autograd.grad(loss, [stage.weight for stage in stages])
    return [
        {"loss": loss.detach() if rank > 1 else None, "gradient": gradients[rank // 2]} for rank in range(4)
    ]


def waits_in_group(seen: Seen, *groups: str) -> bool:
    """Return whether some rank waits in a collective of one of these groups."""
    return any(f"waits in all_reduce number 0 of ranks {group}" in seen.hang for group in groups)


EXERCISE = OnRanks(
    solution=train_step,
    cases=(Case(4, 1, {"samples": 10}), Case(4, 2, {"samples": 6})),
    play=play,
    expected=expected,
    result="loss and gradient",
    after="07-three-dimensions",
    place=60,
    start="Check the program as it is, and read the report: who waits, in what, and for whom?",
    mistakes=(
        Mistake(
            "a-barrier",
            (
                "Look at the report: who waits in the barrier, and can the others come to it?",
                "A barrier without a group is one more collective of all ranks, and the first stage waits for its "
                "gradients meanwhile. It is one more thing to wait for.",
                "Ask which ranks have a loss. Only these can average it.",
            ),
            [
                (
                    "loss = ctx.comm.all_reduce(loss.detach(), replicas,",
                    "ctx.comm.barrier()\n        loss = ctx.comm.all_reduce(loss.detach(), replicas,",
                )
            ],
            when=lambda seen: "barrier" in seen.hang,
        ),
        Mistake(
            "the-pipeline-for-a-group",
            (
                "For which two ranks is the collective that somebody waits in? Do both have a loss?",
                "Ranks 0 and 2 are one pipeline, two stages of one replica. The loss is to be averaged over "
                "replicas, over the ranks that have the same stage.",
                "Ranks 2 and 3 have the losses: their group is `replicas`.",
            ),
            [
                ("ranks in ([0, 1], [2, 3])]", "ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]"),
                (
                    "all_reduce(loss.detach(), replicas,",
                    "all_reduce(loss.detach(), groups[2 + ctx.rank % 2],",
                ),
            ],
            when=lambda seen: waits_in_group(seen, "0,2", "1,3"),
        ),
        Mistake(
            "the-whole-world-for-a-group",
            (
                "Of which ranks is the all_reduce in the report? Which of them call it?",
                "Without a group a collective is of all ranks. Only ranks 2 and 3 come to this line; ranks 0 and 1 "
                "are in the other branch, and wait for a gradient that is only sent afterwards.",
                "Give it the group of the ranks that have a loss: `ctx.comm.all_reduce(loss.detach(), replicas, "
                'op="mean")`.',
            ),
            [("loss.detach(), replicas,", "loss.detach(),")],
            when=lambda seen: "of ranks 0,1,2,3" in seen.hang,
        ),
        Mistake(
            "each-its-own-loss",
            (
                "It ends. Do ranks 2 and 3 report the same loss?",
                "Without the collective, each reports the loss of its own samples. The mean is over both replicas.",
            ),
            [('loss = ctx.comm.all_reduce(loss.detach(), replicas, op="mean")', "loss = loss.detach()")],
        ),
        Mistake(
            "zeros-in-the-mean",
            (
                "It ends. Over how many ranks is the mean of the loss?",
                "The first stage has no loss. If its ranks take part with a zero, the mean is over four, and half "
                "as large.",
                "Only ranks 2 and 3 have something to say: use their group.",
            ),
            [
                ('loss = ctx.comm.all_reduce(loss.detach(), replicas, op="mean")', "loss = loss.detach()"),
                (
                    "    gradient = ",
                    '    mean = ctx.comm.all_reduce(torch.zeros_like(x[0, 0]) if loss is None else loss, op="mean")\n'
                    "    loss = None if loss is None else mean\n    gradient = ",
                ),
            ],
        ),
        Mistake(
            "summed-not-averaged",
            (
                "It ends. How many times too large is the loss?",
                'all_reduce sums, where nothing else is said. The mean over replicas is asked for: `op="mean"`.',
            ),
            [('loss.detach(), replicas, op="mean")', "loss.detach(), replicas)")],
        ),
        Mistake(
            "gradients-of-different-stages",
            (
                "The loss is right. Over which ranks are the gradients averaged?",
                "Ranks 0 and 2 have different weights. A mean over all four ranks mixes gradients of different "
                "stages.",
                "The gradients' all_reduce was right as it was, in the group `replicas`.",
            ),
            [("all_reduce(stage.weight.grad, replicas,", "all_reduce(stage.weight.grad,")],
        ),
    ),
    otherwise=(
        "It is no longer the hang. Which ranks have the same weights? Over those, and only those, everything is "
        "averaged.",
    ),
)

"""Cross-entropy with a divided vocabulary.

The last layer of a language model is the widest: b·s tokens times V logits. Cut it by columns, and each rank has the
logits of its part of the vocabulary. Gathering them would send b·s·V numbers, and every rank would hold them all. But
the loss of a token needs only three numbers of all of them,

    loss = log Σⱼ exp(zⱼ - m) - (z_target - m)        m = max zⱼ

so let each rank compute its share of the three, and put these together: the maximum, the sum, and the logit of the
target (which one rank has; the others have 0 to add). m keeps exp from overflowing, and has no gradient: `detach()` it.

`g(ctx, y)` is the sum of all ranks' y, with a gradient; `ctx.comm.all_reduce(tensor, op="max")` a maximum, without.

Budget: three collectives, of one number a token each.

Source: Shoeybi et al. 2019, section 3, the end.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.exercises.tensor_parallel import operator
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, payload
from mpkit.course.framework.on_ranks import OnRanks


# %% given
def g(ctx: mk.Context, y: Tensor) -> Tensor:
    """Apply Megatron's g: an all-reduce in the forward, the identity in the backward."""
    return operator(y, lambda y: ctx.comm.all_reduce(y), lambda dy: dy)


# %% answer
def cross_entropy(ctx: mk.Context, logits: Tensor, targets: Tensor, start: int) -> Tensor:
    """Return the mean cross-entropy over the tokens: one number, the same on every rank.

    logits: [tokens, V_i], of this rank's part of the vocabulary, which begins with number `start`.
    targets: [tokens], numbers in the whole vocabulary, the same on every rank.
    """
    ### BEGIN SOLUTION
    largest = ctx.comm.all_reduce(logits.detach().amax(-1), op="max")
    z = logits - largest[:, None]
    total = g(ctx, z.exp().sum(-1))
    here = (targets >= start) & (targets < start + logits.shape[1])
    place = torch.where(here, targets - start, 0)
    own = z.gather(-1, place[:, None])[:, 0]
    of_target = g(ctx, torch.where(here, own, 0.0))
    return (total.log() - of_target).mean()
    ### END SOLUTION


# %% checks
TOKENS = 6
SENT = "bytes of collectives"


def part(case: Case) -> int:
    """Return how many words of the vocabulary a rank has."""
    return 4 + 2 * case.ranks


def whole(case: Case) -> tuple[Tensor, Tensor]:
    """Return all logits, and the targets."""
    generator = case.generator(5)
    logits = torch.randn(TOKENS, part(case) * case.ranks, generator=generator, dtype=torch.float64)
    targets = torch.randint(part(case) * case.ranks, (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, part(case) * case.ranks - 1  # on the first rank, and on the last
    return logits * case["scale"], targets


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the loss, and the gradient of this rank's logits."""
    assert callable(answer)
    logits, targets = whole(case)
    mine = logits.chunk(case.ranks, 1)[ctx.rank].clone().requires_grad_()
    loss = answer(ctx, mine, targets, ctx.rank * part(case))
    (3 * loss).backward()
    return {"loss": loss.detach(), "gradient of the logits": mine.grad}


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the results of torch's own cross-entropy with all logits."""
    logits, targets = whole(case)
    logits.requires_grad_()
    loss = F.cross_entropy(logits, targets)
    (grad,) = torch.autograd.grad(3 * loss, logits)
    return [{"loss": loss.detach(), "gradient of the logits": mine} for mine in grad.chunk(case.ranks, 1)]


EXERCISE = OnRanks(
    solution=cross_entropy,
    cases=(
        Case(2, seed=51, sizes={"scale": 1}),
        Case(3, seed=52, sizes={"scale": 3}),
        Case(4, seed=53, sizes={"scale": 1000}),
    ),
    play=play,
    expected=expected,
    result="loss and gradient",
    budgets=(
        Budget(SENT, payload, 3 * TOKENS * 8, "bytes"),
        Budget("collectives", collectives, 3),
    ),
    after="06-tensor-parallel",
    place=50,
    start="Write it for one rank first, with the formula: the maximum, the sum of exp, the target's logit. Then ask "
    "of each of the three what a rank knows of it, and how the ranks put it together.",
    mistakes=(
        Mistake(
            "gathers-all-logits",
            (
                "How many numbers a token travel in your loss, and how many does the formula need?",
                "You put all logits together, so each rank holds b·s·V of them: with a vocabulary of 50,000 that is "
                "the largest tensor of the whole model. Three numbers per token are enough.",
                "All-reduce the maximum; then the sum of exp; then the logit of the target.",
            ),
            """
            def cross_entropy(ctx: mk.Context, logits: Tensor, targets: Tensor, start: int) -> Tensor:
                n = ctx.world_size
                parts = list(ctx.comm.all_gather(logits.detach().t().contiguous()).t().chunk(n, 1))
                parts[ctx.rank] = logits
                return F.cross_entropy(torch.cat(parts, 1), targets)
            """,
            when=lambda seen: seen.budget == SENT,
        ),
        Mistake(
            "no-maximum",
            (
                "Look at the case with large logits. What is exp(1000)?",
                "exp overflows, and inf - inf is nan. Subtract the largest logit first: that changes nothing in the "
                "formula.",
                '`largest = ctx.comm.all_reduce(logits.detach().amax(-1), op="max")`, and go on with '
                "`z = logits - largest[:, None]`.",
            ),
            [("z = logits - largest[:, None]", "z = logits + 0 * largest[:, None]")],
        ),
        Mistake(
            "maximum-of-its-own",
            (
                "Does every rank subtract the same number from the logits of a token?",
                "With a maximum of its own a rank's exp are on another scale than those of the others, and cannot be "
                "added to them. The maximum has to be that of all ranks.",
            ),
            [
                (
                    'ctx.comm.all_reduce(logits.detach().amax(-1), op="max")',
                    "logits.detach().amax(-1)",
                )
            ],
        ),
        Mistake(
            "targets-not-shifted",
            (
                "Where in this rank's logits is token number `start`?",
                "Targets are numbers in the whole vocabulary; this rank's first logit is that of token `start`. Look "
                "at `targets - start`, and only where that is in 0 to V_i - 1.",
            ),
            [("targets - start, 0)", "targets, 0)")],
            when=lambda seen: "out of bounds" in seen.error,
        ),
        Mistake(
            "counts-the-absent",
            (
                "What does a rank add for a token whose target is in another rank's part?",
                "It has to add 0. Some logit of its own is not the target's.",
                "`torch.where(here, own, 0.0)`, with `here` where the target is in this rank's part.",
            ),
            [("torch.where(here, own, 0.0)", "own")],
        ),
        Mistake(
            "log-before-the-sum",
            (
                "What do you add up over ranks: sums of exp, or their logarithms?",
                "log(a + b) is not log a + log b. Add up over ranks first, and take the logarithm then.",
            ),
            [("g(ctx, z.exp().sum(-1))", "g(ctx, z.exp().sum(-1).log())"), ("total.log()", "total")],
        ),
        Mistake(
            "no-gradient-of-the-sum",
            (
                "The loss is right. Which part of its gradient is missing?",
                "∂loss/∂z is softmax(z), less 1 at the target. The softmax comes from the sum of exp: only the "
                "maximum is detached, the sum is not.",
            ),
            [("g(ctx, z.exp().sum(-1))", "g(ctx, z.detach().exp().sum(-1))")],
        ),
        Mistake(
            "summed-over-tokens",
            (
                "By which factor is the loss too large?",
                "It is the mean over the tokens, not their sum.",
            ),
            [(".mean()", ".sum()")],
        ),
    ),
    otherwise=(
        "Compare the three numbers of the first token with those of all logits on one rank: maximum, sum of exp, "
        "target.",
    ),
)

"""Cross-entropy with a divided vocabulary."""

from mpkit.course.author import *
from mpkit.course.exercises.tensor_parallel import operator


# %% given
def g(ctx: mk.Context, y: Tensor) -> Tensor:
    """Apply Megatron's g: an all-reduce in the forward, the identity in the backward."""
    return operator(y, lambda y: ctx.comm.all_reduce(y), lambda dy: dy)


# %% answer
def cross_entropy(ctx: mk.Context, logits: Tensor, targets: Tensor, start: int) -> Tensor:
    """Return the mean cross-entropy over the tokens: one number, the same on every rank.

    logits: [tokens, V_i], of this rank's part of the vocabulary, which begins with number `start`; ranks may have
    more or fewer.
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


def parts(case: Case) -> list[int]:
    """Return how many words of the vocabulary each rank has: equally many in the first case only."""
    return [4 + case.ranks + 2 * rank * (case.ranks > 2) for rank in range(case.ranks)]


def whole(case: Case) -> tuple[Tensor, Tensor]:
    """Return all logits, and the targets."""
    generator = case.generator(5)
    logits = torch.randn(TOKENS, sum(parts(case)), generator=generator, dtype=torch.float64)
    targets = torch.randint(sum(parts(case)), (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, sum(parts(case)) - 1  # on the first rank, and on the last
    targets[2] = sum(
        parts(case)[:-1]
    )  # the last rank's first word, just beyond the words of the rank before it
    return logits * case["scale"], targets


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the loss, and the gradient of this rank's logits."""
    logits, targets = whole(case)
    mine = logits.split(parts(case), 1)[ctx.rank].clone().requires_grad_()
    loss = answer(ctx, mine, targets, sum(parts(case)[: ctx.rank]))
    (3 * loss).backward()
    return {"loss": loss.detach(), "gradient of the logits": mine.grad}


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the results of torch's own cross-entropy with all logits."""
    logits, targets = whole(case)
    logits.requires_grad_()
    loss = F.cross_entropy(logits, targets)
    (grad,) = torch.autograd.grad(3 * loss, logits)
    return [{"loss": loss.detach(), "gradient of the logits": mine} for mine in grad.split(parts(case), 1)]


EXERCISE = OnRanks(
    cases=(
        Case(2, seed=51, sizes={"scale": 1}),
        Case(3, seed=52, sizes={"scale": 3}),
        Case(4, seed=53, sizes={"scale": 1000}),
    ),
    budgets=(Budget(SENT, payload, 3 * TOKENS * 8, "bytes"), Budget("collectives", collectives, 3)),
)

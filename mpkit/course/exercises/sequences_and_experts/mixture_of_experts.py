"""A mixture of experts."""

from mpkit.course.author import *
from mpkit.course.exercises.sequences_and_experts import exchange
from mpkit.course.framework.serial import fill


# %% answer
def mixture(ctx: mk.Context, x: Tensor, scores: Tensor, expert: nn.Module, capacity: int) -> Tensor:
    """Return the results of this rank's tokens, [tokens, h]; zeros for those that are dropped.

    x: [tokens, h], this rank's tokens. scores: [tokens, n], of each token for each expert.
    expert: this rank's expert, number ctx.rank; takes and gives [any number of rows, h].
    capacity: the most tokens that one rank sends to one expert.
    """
    n = ctx.world_size
    ### BEGIN SOLUTION
    # choose
    probability, chosen = scores.softmax(-1).max(-1)
    place = (
        F.one_hot(chosen, n).cumsum(0).gather(1, chosen[:, None])[:, 0] - 1
    )  # among those that chose the same
    kept = (place < capacity).nonzero()[:, 0]
    slot = chosen[kept] * capacity + place[kept]
    # to the experts
    buffer = x.new_zeros(n * capacity, x.shape[1]).index_copy(0, slot, x[kept])
    results = expert(exchange(ctx, buffer))
    # and back
    back = exchange(ctx, results)
    y = torch.zeros_like(x).index_copy(0, kept, back[slot])
    return y * probability[:, None]
    ### END SOLUTION


# %% checks
TOKENS = 9
CALLS, SENT = "collectives, of forward and backward together", "bytes of collectives"


def width(case: Case) -> int:
    """Return h, the numbers of a token."""
    return 3 + case.ranks


def expert_of(case: Case, rank: int) -> nn.Module:
    """Return a rank's expert; its bias shows where a free place is taken for a token."""
    h = width(case)
    return fill(nn.Sequential(nn.Linear(h, 2 * h), nn.Tanh(), nn.Linear(2 * h, h)), 10 * case.seed + rank)


def given(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's tokens, their scores, and the gradient of the result."""
    generator = case.generator(rank)
    x, dy = torch.randn(2, TOKENS, width(case), generator=generator, dtype=torch.float64)
    scores = torch.randn(TOKENS, case.ranks, generator=generator, dtype=torch.float64)
    scores[:6, -1] += 2  # more tokens choose the last expert
    return x.requires_grad_(), scores.requires_grad_(), dy


def outcome(y: Tensor, x: Tensor, scores: Tensor, expert: nn.Module) -> dict[str, object]:
    """Return what is compared."""
    parameters = {f"gradient of the expert's {name}": each.grad for name, each in expert.named_parameters()}
    return {
        "result": y.detach(),
        "gradient of x": x.grad,
        "gradient of the scores": scores.grad,
        **parameters,
    }


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the result and the gradients of this rank's tokens, scores and expert."""
    (x, scores, dy), expert = given(case, ctx.rank), expert_of(case, ctx.rank)
    y = answer(ctx, x, scores, expert, case["capacity"])
    y.backward(dy)
    return outcome(y, x, scores, expert)


def expected(case: Case) -> list[dict[str, object]]:
    """Go through the tokens one by one, with all experts at hand."""
    experts = [expert_of(case, rank) for rank in range(case.ranks)]
    outcomes = []
    for rank in range(case.ranks):
        x, scores, dy = given(case, rank)
        rows, taken = [], [0] * case.ranks
        for token, row in zip(x, scores, strict=True):
            chosen = int(row.argmax())
            taken[chosen] += 1
            fits = taken[chosen] <= case["capacity"]
            rows.append(experts[chosen](token) * row.softmax(0)[chosen] if fits else torch.zeros_like(token))
        y = torch.stack(rows)
        y.backward(dy)
        outcomes.append((y, x, scores))
    return [outcome(*each, expert) for each, expert in zip(outcomes, experts, strict=True)]


EXERCISE = OnRanks(
    cases=(Case(2, 91, {"capacity": TOKENS}), Case(3, 92, {"capacity": 3}), Case(4, 93, {"capacity": 2})),
    budgets=(
        Budget(CALLS, collectives, 4),
        Budget(SENT, payload, lambda case: 4 * case.ranks * case["capacity"] * width(case) * 8, "bytes"),
    ),
)

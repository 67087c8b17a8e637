"""Hang: the last batch."""

from mpkit.course.author import *

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
    cases=(
        Case(2, 1, {"batches": 3}),
        Case(3, 2, {"batches": 4}),
        Case(3, 3, {"batches": 6}),
        Case(4, 4, {"batches": 7}),
    ),
    play=call_with(lambda case, rank: given(case)),
)

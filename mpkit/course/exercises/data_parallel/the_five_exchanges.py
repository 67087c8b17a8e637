"""The five exchanges of DP."""

from mpkit.course.author import *


# %% answer
def five_exchanges(ctx: mk.Context, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor | None:
    """Run one step of DP, up to the gradients on rank 0. Return the loss there.

    inputs: (B, 6), targets: (B, 3), of which only rank 0's are real; B is a multiple of ctx.world_size.
    """
    ### BEGIN SOLUTION
    loss = None
    # ---- scatter the inputs
    mine = ctx.comm.scatter(inputs)
    # ---- lend the parameters
    for parameter in model.parameters():
        ctx.comm.broadcast(parameter)
    outputs = model(mine)
    # ---- gather the outputs
    whole = ctx.comm.gather(outputs)
    gradient = torch.empty(len(inputs), outputs.shape[1], dtype=outputs.dtype)
    if ctx.rank == 0:
        whole.requires_grad_()
        loss = F.mse_loss(whole, targets)
        (gradient,) = torch.autograd.grad(loss, whole)
    # ---- scatter their gradients
    outputs.backward(ctx.comm.scatter(gradient))
    # ---- reduce the gradients
    for parameter in model.parameters():
        parameter.grad = ctx.comm.reduce(parameter.grad)
    return loss
    ### END SOLUTION


# %% checks
STEPS = 3


def batches(case: Case) -> list[serial.Batch]:
    """Return the whole batch of each step: six samples for each rank."""
    return serial.batches(case, 6 * case.ranks, STEPS)


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run some steps with the answer; rank 0 has the optimizer."""
    model = serial.model(case.seed)
    optimizer = serial.sgd(model)
    losses = []
    for x, y in batches(case):
        optimizer.zero_grad()
        if ctx.rank != 0:
            x, y = torch.full_like(x, 7.0), torch.full_like(y, 7.0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)
        loss = answer(ctx, model, x, y)
        if ctx.rank == 0:
            losses.append(loss)
            optimizer.step()
    return serial.outcome(losses, model) if ctx.rank == 0 else None


def expected(case: Case) -> list[object]:
    """Return what serial training gives on rank 0, and None on the others."""
    data = batches(case)
    return [serial.train(serial.model(case.seed), data)] + [None] * (case.ranks - 1)


def others(seen: Seen) -> float:
    """Count the collectives that are none of DP's five."""
    return sum(calls(kind)(seen) for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER))


PARAMETERS = len(list(serial.model(0).parameters()))

EXERCISE = OnRanks(
    cases=(Case(2, seed=1), Case(3, seed=2), Case(4, seed=3)),
    budgets=(
        Budget("scatters", calls(Kind.SCATTER), 2 * STEPS),
        Budget("gathers", calls(Kind.GATHER), STEPS),
        Budget("broadcasts", calls(Kind.BROADCAST), PARAMETERS * STEPS),
        Budget("reduces", calls(Kind.REDUCE), PARAMETERS * STEPS),
        Budget("collectives that are not DP's", others, 0),
    ),
)

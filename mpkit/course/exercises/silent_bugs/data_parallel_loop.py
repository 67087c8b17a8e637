"""Silent bug 1: a data-parallel loop."""

from mpkit.course.author import *


# %% answer
def train(ctx: mk.Context, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train for one step per batch; return the losses. `batches` are whole ones, (B, 6) and (B, 3), on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for inputs, targets in batches:
        mine = slice(ctx.rank, None, ctx.world_size)
        loss = F.mse_loss(model(inputs[mine]), targets[mine])
        optimizer.zero_grad()
        loss.backward()
        ### BEGIN SOLUTION
        # instead: for parameter in model.parameters():
        # instead:     ctx.comm.all_reduce(parameter.grad)
        for parameter in model.parameters():
            ctx.comm.all_reduce(parameter.grad, op="mean")
        ### END SOLUTION
        optimizer.step()
        losses.append(ctx.comm.all_reduce(loss.detach(), op="mean").item())
    return losses


# %% checks
SAMPLES = 48


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the losses and the weights of the answer."""
    model = serial.model(case.seed)
    return serial.outcome(answer(ctx, model, serial.batches(case, SAMPLES, case["steps"])), model)


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives."""
    return [serial.train(serial.model(case.seed), serial.batches(case, SAMPLES, case["steps"]))] * case.ranks


EXERCISE = OnRanks(cases=(Case(2, 1, {"steps": 4}), Case(3, 2, {"steps": 4}), Case(4, 3, {"steps": 5})))

"""An uneven last batch, weighted right."""

from mpkit.course.author import *


# %% answer
def uneven(ctx: mk.Context, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error over all ranks' samples; leave its gradient in each `parameter.grad`.

    inputs: (k, 6), targets: (k, 3), this rank's samples; k differs from rank to rank, and may be 0.
    """
    ### BEGIN SOLUTION
    errors = F.mse_loss(model(inputs), targets, reduction="sum")
    mine = torch.stack([errors.detach(), torch.tensor(float(targets.numel()))])
    total, numbers = ctx.comm.all_reduce(mine)
    (errors / numbers).backward()
    for parameter in model.parameters():
        ctx.comm.all_reduce(parameter.grad)
    return total / numbers
    ### END SOLUTION


# %% checks
def bounds(case: Case, rank: int) -> slice:
    """Return which samples of the batch belong to a rank."""
    shares = case["samples"]
    return slice(sum(shares[:rank]), sum(shares[: rank + 1]))


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the loss, and the gradients that the answer leaves."""
    model = serial.model(case.seed)
    x, y = serial.batches(case, sum(case["samples"]), 1)[0]
    mine = bounds(case, ctx.rank)
    loss = answer(ctx, model, x[mine], y[mine])
    return {"loss": loss, "gradients": serial.gradients(model)}


def expected(case: Case) -> list[object]:
    """Return the loss and the gradients of one backward over all samples."""
    model = serial.model(case.seed)
    x, y = serial.batches(case, sum(case["samples"]), 1)[0]
    loss = serial.mse(model(x), y)
    torch.autograd.backward(loss)
    return [{"loss": loss.item(), "gradients": serial.gradients(model.float())}] * case.ranks


MODEL = list(serial.model(0).parameters())

EXERCISE = OnRanks(
    cases=(
        Case(2, 1, {"samples": [4, 4]}),
        Case(2, 2, {"samples": [4, 1]}),
        Case(3, 3, {"samples": [3, 2, 2]}),
        Case(4, 4, {"samples": [2, 2, 1, 0]}),
    ),
    budgets=(
        Budget("collectives", collectives, len(MODEL) + 2),
        Budget("payload", payload, sum(parameter.nbytes for parameter in MODEL) + 64, "bytes"),
    ),
)

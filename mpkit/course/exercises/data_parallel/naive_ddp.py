"""Naive DDP."""

from mpkit.course.author import *


# %% answer
def naive_ddp(
    ctx: mk.Context, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]
) -> None:
    """Train `model` by the mean squared error, a step for each of `batches`: (inputs, targets), this rank's shares."""
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        ctx.comm.broadcast(parameter)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            ctx.comm.all_reduce(parameter.grad)
            parameter.grad /= ctx.world_size
        optimizer.step()
    ### END SOLUTION


# %% checks
STEPS, SAMPLES = 3, 12
OPTIMIZERS = {"SGD": serial.sgd, "Adam": serial.adam}


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the weights after some steps from this rank's own weights."""
    model = serial.model(case.seed + 10 * ctx.rank)
    data = [serial.share(batch, ctx.rank, ctx.world_size) for batch in serial.batches(case, SAMPLES, STEPS)]
    answer(ctx, model, OPTIMIZERS[case["optimizer"]](model), data)
    return serial.weights(model)


def expected(case: Case) -> list[object]:
    """Return the weights of serial training from rank 0's weights."""
    optimizer = OPTIMIZERS[case["optimizer"]]
    trained = serial.train(serial.model(case.seed), serial.batches(case, SAMPLES, STEPS), optimizer=optimizer)
    return [trained["weights"]] * case.ranks


MODEL = list(serial.model(0).parameters())

EXERCISE = OnRanks(
    cases=(
        Case(2, 1, {"optimizer": "SGD"}),
        Case(3, 2, {"optimizer": "Adam"}),
        Case(4, 3, {"optimizer": "SGD"}),
    ),
    budgets=(
        Budget("all-reduces", calls(Kind.ALL_REDUCE), STEPS * len(MODEL)),
        Budget("payload", payload, (STEPS + 1) * sum(p.nbytes for p in MODEL), "bytes"),
    ),
)

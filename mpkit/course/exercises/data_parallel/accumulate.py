"""Accumulate without sync."""

from mpkit.course.author import *


# %% given
def average(ctx: mk.Context, model: nn.Module) -> None:
    """Naive DDP: replace each gradient by its mean over all ranks."""
    for parameter in model.parameters():
        ctx.comm.all_reduce(parameter.grad, op="mean")


# %% answer
def accumulate(
    ctx: mk.Context,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: list[list[tuple[Tensor, Tensor]]],
) -> None:
    """Train `model` by the mean squared error.

    steps: for each optimizer step the micro-batches of this rank, (inputs, targets) each, all of one size; some steps
    may have fewer of them.
    """
    ### BEGIN SOLUTION
    for microbatches in steps:
        optimizer.zero_grad()
        for inputs, targets in microbatches:
            loss = F.mse_loss(model(inputs), targets) / len(microbatches)
            loss.backward()
        average(ctx, model)
        optimizer.step()
    ### END SOLUTION


# %% checks
STEPS = 3
SAMPLES = 32


def batches(case: Case) -> list[serial.Batch]:
    """Return whole batches with 32 samples in each micro-batch of each rank; the last has a micro-batch fewer."""
    a_micro_batch = SAMPLES * case.ranks
    *others, (x, y) = serial.batches(case, a_micro_batch * case["microbatches"], STEPS)
    fewer = a_micro_batch * max(1, case["microbatches"] - 1)
    return [*others, (x[:fewer], y[:fewer])]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the weights after some steps."""
    model, steps = serial.model(case.seed), []
    for batch in batches(case):
        x, y = serial.share(batch, ctx.rank, ctx.world_size)
        steps.append(list(zip(x.split(SAMPLES), y.split(SAMPLES), strict=True)))
    with Memory(ctx, model.parameters()):
        answer(ctx, model, serial.sgd(model), steps)
    return serial.weights(model)


def expected(case: Case) -> list[object]:
    """Return the weights of serial training, with one step per whole batch."""
    trained = serial.train(serial.model(case.seed), batches(case))
    return [trained["weights"]] * case.ranks


MODEL = list(serial.model(0).parameters())
OUTPUTS = 8 * SAMPLES * (2 * sum(serial.WIDTHS[1:]) - serial.WIDTHS[-1])  # bytes, of layers and of tanh

EXERCISE = OnRanks(
    cases=(
        Case(2, 1, {"microbatches": 3}),
        Case(3, 2, {"microbatches": 2}),
        Case(2, 4, {"microbatches": 1}),
        Case(4, 3, {"microbatches": 4}),
    ),
    budgets=(
        Budget("all-reduces in an optimizer step", lambda s: calls(Kind.ALL_REDUCE)(s) / STEPS, len(MODEL)),
        Budget("payload", payload, STEPS * sum(parameter.nbytes for parameter in MODEL), "bytes"),
        Budget("peak of the activations of a rank", peak("activations"), 2 * OUTPUTS, "bytes"),
    ),
)

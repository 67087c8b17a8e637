"""ZeRO-1: shard the optimizer states."""

from mpkit.course.author import *
from mpkit.course.exercises.zero import flat, shard_bytes, shares, unflat, weights_of_adam


# %% answer
def zero_1(
    ctx: mk.Context,
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> None:
    """Train `model`, which is the same on every rank, in place: one step per batch, with the loss `F.mse_loss`.

    batches: (x, y) of this rank, one per step; a step's whole batch is that of all ranks, in equal shares.
    make_optimizer: makes an Adam for a list of tensors, as in `make_optimizer([shard])`.
    """
    ### BEGIN SOLUTION
    n = ctx.world_size
    weights = list(model.parameters())
    shard = flat(weights, n).chunk(n)[ctx.rank].clone()
    optimizer = make_optimizer([shard])
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        grads = flat([weight.grad for weight in weights if weight.grad is not None], n)
        shard.grad = ctx.comm.reduce_scatter(grads) / n
        optimizer.step()
        unflat(ctx.comm.all_gather(shard), weights)
        model.zero_grad()
    ### END SOLUTION


# %% checks
STEPS = 3
OPTIMIZER = "bytes of optimizer states"
SENT = "bytes that a rank sends, on a ring"


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the model's weights after the answer has trained it."""
    model = serial.model(case.seed)
    with Memory(ctx, model.parameters()):
        answer(ctx, model, shares(case, ctx.rank, STEPS), serial.adam)
    return serial.weights(model)


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the weights that serial training gives."""
    return weights_of_adam(case, STEPS)


EXERCISE = OnRanks(
    cases=(Case(2, seed=11), Case(3, seed=12), Case(4, seed=13)),
    budgets=(
        Budget(OPTIMIZER, peak("optimizer"), lambda case: 2 * shard_bytes(case), "bytes"),
        Budget("collectives", collectives, 2 * STEPS),
        Budget(SENT, ring, lambda case: STEPS * 2 * (case.ranks - 1) * shard_bytes(case), "bytes"),
    ),
)

"""Offload: keep the optimizer on the host."""

from mpkit.course.author import *
from mpkit.course.exercises.zero import flat, shard_bytes, shares, unflat, weights_of_adam


# %% answer
def offload(
    ctx: mk.Context,
    host: Host,
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> None:
    """Train `model`, which is on the device and the same on every rank: one step per batch, with `F.mse_loss`.

    host: `host.put(tensor)`, `host.get(tensor)`.
    batches: (x, y) of this rank, one per step; a step's whole batch is that of all ranks, in equal shares.
    make_optimizer: makes an Adam for a list of tensors, as in `make_optimizer([shard])`.
    """
    n = ctx.world_size
    weights = list(model.parameters())
    ### BEGIN SOLUTION
    shard = host.put(flat(weights, n).chunk(n)[ctx.rank])
    optimizer = make_optimizer([shard])
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        grads = flat([weight.grad for weight in weights if weight.grad is not None], n)
        model.zero_grad()
        shard.grad = host.put(ctx.comm.reduce_scatter(grads) / n)
        optimizer.step()
        unflat(ctx.comm.all_gather(host.get(shard)), weights)
    ### END SOLUTION


# %% checks
STEPS = 3
OPTIMIZER = "bytes of optimizer states on the device"
DOWN, UP = "bytes copied to the host", "bytes copied to the device"
SENT = "bytes that a rank sends, on a ring"


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the model's weights after the answer has trained it."""
    model = serial.model(case.seed)
    with Memory(ctx, model.parameters()) as memory:
        answer(ctx, Host(ctx, memory), model, shares(case, ctx.rank, STEPS), serial.adam)
    return serial.weights(model)


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the weights that serial training gives."""
    return weights_of_adam(case, STEPS)


EXERCISE = OnRanks(
    cases=(Case(2, seed=51), Case(3, seed=52), Case(4, seed=53)),
    budgets=(
        Budget(OPTIMIZER, peak("optimizer"), 0, "bytes"),
        Budget(UP, copied_bytes(Kind.COPY_TO_DEVICE), lambda case: STEPS * shard_bytes(case), "bytes"),
        Budget(DOWN, copied_bytes(Kind.COPY_TO_HOST), lambda case: (STEPS + 1) * shard_bytes(case), "bytes"),
        Budget(SENT, ring, lambda case: STEPS * 2 * (case.ranks - 1) * shard_bytes(case), "bytes"),
    ),
)

"""ZeRO-2: shard the gradients as well."""

from mpkit.course.author import *
from mpkit.course.exercises.zero import flat, shares, unflat, weights_of_adam


# %% answer
def zero_2(
    ctx: mk.Context,
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> None:
    """Train `model`, which is the same on every rank, in place: one step per batch, with the loss `F.mse_loss`.

    batches: (x, y) of this rank, one per step; a step's whole batch is that of all ranks, in equal shares.
    make_optimizer: makes an Adam for a list of tensors, as in `make_optimizer(shards)`.
    """
    n = ctx.world_size
    weights = list(model.parameters())
    ### BEGIN SOLUTION
    # instead: shards = ...  # of each weight, this rank's n-th
    # instead: optimizer = ...
    # instead: ...
    # instead: raise NotImplementedError("your turn: the hooks, and the steps")
    shards = [flat([weight], n).chunk(n)[ctx.rank].clone() for weight in weights]
    shard_of: dict[Tensor, Tensor] = dict(zip(weights, shards, strict=True))
    optimizer = make_optimizer(shards)

    def reduce(weight: Tensor) -> None:
        assert weight.grad is not None
        shard_of[weight].grad = ctx.comm.reduce_scatter(flat([weight.grad], n)) / n
        weight.grad = None

    for weight in weights:
        weight.register_post_accumulate_grad_hook(reduce)
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        for weight, shard in zip(weights, shards, strict=True):
            unflat(ctx.comm.all_gather(shard), [weight])
    ### END SOLUTION


# %% checks
WIDTHS = (6, *[8] * 7, 3)
STEPS = 2
GRADS = "bytes of gradients"
WAITING = "bytes of gradients that are not sent yet"
OPTIMIZER = "bytes of optimizer states"
SENT = "bytes that a rank sends, on a ring"
REDUCE = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.REDUCE)


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the model's weights after the answer has trained it."""
    model = serial.model(case.seed, WIDTHS)

    def mark_gradient(weight: Tensor) -> None:
        with ctx.record.span("gradient", nbytes=weight.nbytes):
            pass

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(mark_gradient)
    with Memory(ctx, model.parameters()):
        answer(ctx, model, shares(case, ctx.rank, STEPS), serial.adam)
    return serial.weights(model)


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the weights that serial training gives."""
    return weights_of_adam(case, STEPS, WIDTHS)


def shard_bytes(case: Case) -> int:
    """Return the bytes of the n-ths of all parameters that a rank has."""
    return sum(-(-weight.numel() // case.ranks) * 8 for weight in serial.model(0, WIDTHS).parameters())


def waiting(seen: Seen) -> float:
    """Return the most bytes of gradients that a rank has made and not begun to send."""
    most = 0.0
    for rank in seen.ranks:
        held = 0.0
        for op in rank.ops:
            if op["kind"] == Kind.COMPUTE:
                held += float(op["bytes"])
                most = max(most, held)
            elif op["kind"] in REDUCE:
                held = max(0.0, held - float(op["bytes"]))
    return most


EXERCISE = OnRanks(
    cases=(Case(2, seed=21), Case(3, seed=22), Case(4, seed=23)),
    budgets=(
        Budget(OPTIMIZER, peak("optimizer"), lambda case: 2 * shard_bytes(case), "bytes"),
        Budget(GRADS, peak("grads"), lambda case: shard_bytes(case) + 3 * max(WIDTHS) ** 2 * 8, "bytes"),
        Budget(WAITING, waiting, 3 * max(WIDTHS) * (max(WIDTHS) + 1) * 8, "bytes"),
        Budget(SENT, ring, lambda case: STEPS * 2 * (case.ranks - 1) * shard_bytes(case), "bytes"),
        Budget("collectives", collectives, STEPS * 2 * 2 * (len(WIDTHS) - 1)),
    ),
)

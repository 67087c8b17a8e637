"""Prefetch the next layer."""

from mpkit.course.author import *
from mpkit.course.exercises.zero import square_layers


# %% given
def compute(ctx: mk.Context, i: int, weights: Tensor, x: Tensor) -> Tensor:
    """Return the output of layer i: [b, h] -> [b, h]. weights: [h * h], flat."""
    with ctx.record.span(f"layer {i}"):
        return torch.tanh(x @ weights.view(x.shape[1], x.shape[1]))


# %% answer
def prefetch(ctx: mk.Context, shards: list[Tensor], x: Tensor) -> Tensor:
    """Run a forward, [b, h] -> [b, h], in which the next layer's parameters travel while a layer computes.

    shards: this rank's n-th of each layer's flat parameters, [h * h / n].
    """
    ### BEGIN SOLUTION
    # instead: for i, shard in enumerate(shards):
    # instead:     weights = ctx.comm.all_gather(shard)
    # instead:     x = compute(ctx, i, weights, x)
    # instead: return x
    work = ctx.comm.all_gather(shards[0], async_op=True)
    for i in range(len(shards)):
        weights = work.wait()
        if i + 1 < len(shards):
            work = ctx.comm.all_gather(shards[i + 1], async_op=True)
        x = compute(ctx, i, weights, x)
        del weights
    return x
    ### END SOLUTION


# %% checks
LAYERS, WIDTH, ROWS = 8, 12, 2
LAYER = WIDTH * WIDTH * 8
EXPOSED = "layers that compute while no gather is under way"
HELD = "bytes of gathered parameters and all else"


def raced(seen: Seen) -> bool:
    """Return whether a layer computes before its own gather is waited for."""
    orders = [gathers_and_layers(rank.ops) for rank in seen.ranks]
    return any(
        layer < waited
        for gathers, layers in orders
        for (_, waited), layer in zip(gathers, layers, strict=False)
    )


def whole(case: Case) -> list[Tensor]:
    """Return every layer's parameters."""
    return square_layers(case, case.sizes.get("layers", LAYERS), WIDTH)


def samples(case: Case, rank: int) -> Tensor:
    """Return a rank's x."""
    return torch.randn(ROWS, WIDTH, generator=case.generator(rank), dtype=torch.float64)


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run the answer with this rank's shards."""
    shards = [weights.chunk(case.ranks)[ctx.rank].clone() for weights in whole(case)]
    x = samples(case, ctx.rank)
    with Memory(ctx, shards):
        return answer(ctx, shards, x)


def expected(case: Case) -> list[Tensor]:
    """Return each rank's outputs."""
    results = []
    for rank in range(case.ranks):
        x = samples(case, rank)
        for weights in whole(case):
            x = torch.tanh(x @ weights.view(WIDTH, WIDTH))
        results.append(x)
    return results


EXERCISE = OnRanks(
    cases=(Case(2, seed=41), Case(3, seed=42), Case(4, seed=43, sizes={"layers": 5})),
    budgets=(
        Budget("collectives", collectives, LAYERS),
        Budget(EXPOSED, count_exposed_layers, 1),
        Budget(HELD, peak("activations"), 4 * LAYER + 6 * ROWS * WIDTH * 8, "bytes"),
    ),
)

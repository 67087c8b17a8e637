"""ZeRO-3: shard the parameters."""

from mpkit.course.author import *
from mpkit.course.exercises.zero import square_layers


# %% given
def layer(weights: Tensor, x: Tensor) -> Tensor:
    """Return a layer's output: [b, h] -> [b, h]. weights: [h * h], flat."""
    return torch.tanh(x @ weights.view(x.shape[1], x.shape[1]))


# %% answer
def zero_3(ctx: mk.Context, shards: list[Tensor], x: Tensor, target: Tensor) -> list[Tensor]:
    """Return the gradients of this rank's shards, of the mean loss over all ranks' samples.

    shards: this rank's n-th of each layer's flat parameters, [h * h / n].
    x, target: this rank's samples, [b, h], the same number on each rank. The loss is `((out - target) ** 2).mean()`.
    """
    n = ctx.world_size
    inputs = []
    ### BEGIN SOLUTION
    # instead: for shard in shards:
    # instead:     ...  # gather, compute; keep the layer's input
    # instead: grad = 2 * (x - target) / x.numel()  # of the loss, for the last layer's output
    # instead: raise NotImplementedError("your turn: the backward, from the last layer to the first")
    for shard in shards:
        weights = ctx.comm.all_gather(shard)
        inputs.append(x)
        x = layer(weights, x)
        del weights
    grad = 2 * (x - target) / x.numel()
    grads = []
    for shard in reversed(shards):
        weights = ctx.comm.all_gather(shard).requires_grad_()
        x = inputs.pop().detach().requires_grad_()
        of_weights, grad = torch.autograd.grad(layer(weights, x), (weights, x), grad)
        del weights
        grads.append(ctx.comm.reduce_scatter(of_weights) / n)
        del of_weights
    return grads[::-1]
    ### END SOLUTION


# %% checks
LAYERS, WIDTH = 8, 12
LAYER = WIDTH * WIDTH * 8
SENT = "bytes that a rank sends, on a ring"
HELD = "bytes held besides the shards"
GATHERS = "all-gathers"


def rows(case: Case) -> int:
    """Return how many samples a rank has."""
    return 2 + (case.ranks - 2) % 2


def samples(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Return a rank's x and target."""
    x, target = torch.randn(2, rows(case), WIDTH, generator=case.generator(rank), dtype=torch.float64)
    return x, 3 * target


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run the answer with this rank's shards."""
    shards = [weights.chunk(case.ranks)[ctx.rank].clone() for weights in square_layers(case, LAYERS, WIDTH)]
    x, target = samples(case, ctx.rank)
    with Memory(ctx, shards):
        return answer(ctx, shards, x, target)


def expected(case: Case) -> list[list[Tensor]]:
    """Return each rank's n-th of the gradients of serial training."""
    weights = [each.requires_grad_() for each in square_layers(case, LAYERS, WIDTH)]
    of_ranks = [samples(case, rank) for rank in range(case.ranks)]
    x = torch.cat([x for x, _ in of_ranks])
    target = torch.cat([target for _, target in of_ranks])
    for each in weights:
        x = layer(each, x)
    grads = torch.autograd.grad(((x - target) ** 2).mean(), weights)
    return [[grad.chunk(case.ranks)[rank] for grad in grads] for rank in range(case.ranks)]


def most(case: Case) -> float:
    """Return the bytes of a layer's parameters and gradients, room to send them, all shards' gradients, and inputs."""
    return 3 * LAYER + LAYERS * (LAYER / case.ranks + 2 * rows(case) * WIDTH * 8)


EXERCISE = OnRanks(
    cases=(Case(2, seed=31), Case(3, seed=32), Case(4, seed=33)),
    budgets=(
        Budget(GATHERS, calls(Kind.ALL_GATHER), 2 * LAYERS),
        Budget(SENT, ring, lambda case: 3 * LAYERS * LAYER * (case.ranks - 1) / case.ranks, "bytes"),
        Budget(HELD, peak("grads", "activations"), most, "bytes"),
    ),
)

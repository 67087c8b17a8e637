"""Secondary shards: gather once between nodes."""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import bytes_between_nodes, peak
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.on_ranks import OnRanks


# %% given
def layer(weights: Tensor, x: Tensor) -> Tensor:
    """Return a layer's output: [b, h] -> [b, h]. weights: [h * h], flat."""
    return torch.tanh(x @ weights.view(x.shape[1], x.shape[1]))


# %% answer
def secondary_shards(
    ctx: mk.Context, shards: list[Tensor], x: Tensor, target: Tensor, s: int
) -> list[Tensor]:
    """Return the gradients of this rank's shards, of the mean loss over all ranks' samples.

    shards: this rank's n-th of each layer's flat parameters, [h * h / n].
    x, target: this rank's samples, [b, h], the same number on each rank. The loss is `((out - target) ** 2).mean()`.
    s: the ranks of each node; n is a multiple of it.
    """
    n = ctx.world_size
    inputs = []
    ### BEGIN SOLUTION
    # instead: for shard in shards:
    # instead:     weights = ctx.comm.all_gather(shard)
    # instead:     inputs.append(x)
    # instead:     x = layer(weights, x)
    # instead: grad = 2 * (x - target) / x.numel()  # of the loss, for the last layer's output
    # instead: raise NotImplementedError("your turn: the backward, which gathers within the node")
    nodes = [ctx.comm.group(range(first, first + s)) for first in range(0, n, s)]
    node, place = nodes[ctx.rank // s], ctx.rank % s
    secondary = []
    for shard in shards:
        weights = ctx.comm.all_gather(shard)
        secondary.append(weights.chunk(s)[place].clone())
        inputs.append(x)
        x = layer(weights, x)
        del weights
    grad = 2 * (x - target) / x.numel()
    grads = []
    for _ in shards:
        weights = node.all_gather(secondary.pop()).requires_grad_()
        x = inputs.pop().detach().requires_grad_()
        of_weights, grad = torch.autograd.grad(layer(weights, x), (weights, x), grad)
        del weights
        grads.append(ctx.comm.reduce_scatter(of_weights) / n)
        del of_weights
    return grads[::-1]
    ### END SOLUTION


# %% checks
LAYERS, WIDTH, ROWS = 8, 12, 2
LAYER = WIDTH * WIDTH * 8
BETWEEN = "bytes that a rank sends in collectives between nodes"
HELD = "bytes held besides the shards"


def whole(case: Case) -> list[Tensor]:
    """Return every layer's parameters."""
    generator = case.generator(555)
    scale = 1.5 / WIDTH**0.5
    return [
        torch.randn(WIDTH * WIDTH, generator=generator, dtype=torch.float64) * scale for _ in range(LAYERS)
    ]


def samples(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Return a rank's x and target."""
    x, target = torch.randn(2, ROWS, WIDTH, generator=case.generator(rank), dtype=torch.float64)
    return x, 3 * target


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run the answer with this rank's shards."""
    shards = [weights.chunk(case.ranks)[ctx.rank].clone() for weights in whole(case)]
    x, target = samples(case, ctx.rank)
    with Memory(ctx, shards):
        return answer(ctx, shards, x, target, case["a_node"])


def expected(case: Case) -> list[list[Tensor]]:
    """Return each rank's n-th of the gradients of serial training."""
    weights = [each.requires_grad_() for each in whole(case)]
    of_ranks = [samples(case, rank) for rank in range(case.ranks)]
    x = torch.cat([x for x, _ in of_ranks])
    target = torch.cat([target for _, target in of_ranks])
    for each in weights:
        x = layer(each, x)
    grads = torch.autograd.grad(((x - target) ** 2).mean(), weights)
    return [[grad.chunk(case.ranks)[rank] for grad in grads] for rank in range(case.ranks)]


def between(case: Case) -> float:
    """Return the bytes of a gather and a reduce-scatter of every layer among all ranks."""
    return 2 * LAYERS * LAYER * (case.ranks - 1) / case.ranks


def most(case: Case) -> float:
    """Return the bytes of a layer's parameters and gradients, room to send them, and what is kept of every layer."""
    kept = LAYER / case["a_node"] + LAYER / case.ranks + 2 * ROWS * WIDTH * 8
    return 3 * LAYER + LAYERS * kept


EXERCISE = OnRanks(
    solution=secondary_shards,
    cases=(Case(4, 81, {"a_node": 2}), Case(6, 82, {"a_node": 3}), Case(6, 83, {"a_node": 2})),
    play=play,
    expected=expected,
    result="the gradients of each shard",
    budgets=(
        Budget(BETWEEN, bytes_between_nodes, between, "bytes"),
        Budget(HELD, peak("grads", "activations"), most, "bytes"),
    ),
    after="03-zero",
    place=45,
    when={
        "gathers-among-all": lambda seen: (
            seen.budget == BETWEEN and bytes_between_nodes(seen) == 1.5 * between(seen.case)
        ),
        "groups-across-nodes": lambda seen: (
            seen.budget == BETWEEN and bytes_between_nodes(seen) < 1.5 * between(seen.case)
        ),
        "a-view-keeps-the-whole": lambda seen: seen.budget == HELD,
    },
)

"""ZeRO-3: shard the parameters.

Now a rank holds an n-th of each layer's parameters, and nothing else. A layer's parameters are gathered before it
computes, and freed after it:

    forward    for each layer        all-gather its parameters, compute, free them
    backward   for each, the last    all-gather them again, compute the gradients, free the parameters,
               first                 reduce-scatter the gradients, keep your n-th

Write one forward and backward. `layer(weights, x)` computes a layer from its flat parameters. Keep each layer's input
in the forward. In the backward compute the layer once more from it, with `weights` and `x` that require gradients, and
ask `torch.autograd.grad` for both. A tensor is freed when no name and no list refers to it any more.

Budget: 3ψ(n-1)/n numbers sent by a rank, and bytes held: never the parameters of all layers.

Source: Rajbhandari et al., SC 2020, sections 5.3 (P_os+g+p) and 7.2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import calls, peak, ring
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.trace import Kind


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


def whole(case: Case) -> list[Tensor]:
    """Return every layer's parameters."""
    generator = case.generator(555)
    scale = 1.5 / WIDTH**0.5
    return [
        torch.randn(WIDTH * WIDTH, generator=generator, dtype=torch.float64) * scale for _ in range(LAYERS)
    ]


def rows(case: Case) -> int:
    """Return how many samples a rank has."""
    return 2 + (case.ranks - 2) % 2


def samples(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Return a rank's x and target."""
    x, target = torch.randn(2, rows(case), WIDTH, generator=case.generator(rank), dtype=torch.float64)
    return x, 3 * target


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer with this rank's shards."""
    assert callable(answer)
    shards = [weights.chunk(case.ranks)[ctx.rank].clone() for weights in whole(case)]
    x, target = samples(case, ctx.rank)
    with Memory(ctx, shards):
        return answer(ctx, shards, x, target)


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


def most(case: Case) -> float:
    """Return the bytes of a layer's parameters and gradients, room to send them, all shards' gradients, and inputs."""
    return 3 * LAYER + LAYERS * (LAYER / case.ranks + 2 * rows(case) * WIDTH * 8)


EXERCISE = OnRanks(
    solution=zero_3,
    cases=(Case(2, seed=31), Case(3, seed=32), Case(4, seed=33)),
    play=play,
    expected=expected,
    result="the gradients of each shard",
    budgets=(
        Budget(GATHERS, calls(Kind.ALL_GATHER), 2 * LAYERS),
        Budget(SENT, ring, lambda case: 3 * LAYERS * LAYER * (case.ranks - 1) / case.ranks, "bytes"),
        Budget(HELD, peak("grads", "activations"), most, "bytes"),
    ),
    after="03-zero",
    place=40,
    start="Write the forward first: for each shard, all-gather it, remember `x`, and let `x` be the layer's output. "
    "Print the loss on 2 ranks, and compare it with what you get from all parameters on one.",
    mistakes=(
        Mistake(
            "keeps-what-it-gathered",
            (
                "The gradients are right. How many layers' parameters are there at the end of the forward?",
                "Whatever is in a list, or is kept by autograd's graph for its backward, is not freed. Then stage 3 "
                "has saved nothing: at the end of the forward everybody holds everything.",
                "Keep only the inputs. Gather each layer's parameters again in the backward.",
            ),
            [
                ("    inputs = []\n", "    inputs = []\n    kept = []\n"),
                ("        del weights\n    grad = 2", "        kept.append(weights)\n    grad = 2"),
                ("ctx.comm.all_gather(shard).requires_grad_()", "kept.pop().requires_grad_()"),
            ],
            when=lambda seen: seen.budget == HELD,
        ),
        Mistake(
            "all-reduces-the-gradients",
            (
                "Of the gradients that a rank receives, which does it return?",
                "An all-reduce sends 2ψ, a reduce-scatter ψ: everybody needs the sum of its own n-th only.",
                "`ctx.comm.reduce_scatter(of_weights) / n`",
            ),
            [
                (
                    "ctx.comm.reduce_scatter(of_weights) / n",
                    "(ctx.comm.all_reduce(of_weights).chunk(n)[ctx.rank] / n).clone()",
                )
            ],
            when=lambda seen: seen.budget == SENT,
        ),
        Mistake(
            "gathers-too-often",
            (
                "How often has a layer's parameters to be whole in one step?",
                "Once for its forward, once for its backward, in which one gather is enough for both gradients.",
            ),
            [
                (
                    "        inputs.append(x)\n        x = layer(weights, x)\n",
                    "        inputs.append(x)\n        x = layer(weights, x)\n"
                    "        weights = ctx.comm.all_gather(shard)\n",
                )
            ],
            when=lambda seen: seen.budget == GATHERS,
        ),
        Mistake(
            "summed-not-averaged",
            (
                "A reduce-scatter adds up n ranks' gradients. Over how many samples is the loss a mean?",
                "Each rank's loss is a mean over its own samples, so the gradient of the whole batch is the mean of "
                "the ranks' gradients: divide by n.",
            ),
            [("reduce_scatter(of_weights) / n", "reduce_scatter(of_weights)")],
        ),
        Mistake(
            "last-layer-first",
            (
                "The numbers are right, in the wrong places. In which order does the backward make them?",
                "The backward begins with the last layer, so a list that you append to ends with the first: turn it "
                "round.",
            ),
            [("return grads[::-1]", "return grads")],
        ),
        Mistake(
            "own-samples-only",
            (
                "Of whose samples are the gradients that a rank returns?",
                "A rank keeps an n-th for everybody, so it needs the gradients of all ranks' samples, not a part of "
                "its own.",
                "`ctx.comm.reduce_scatter(of_weights) / n`",
            ),
            [("ctx.comm.reduce_scatter(of_weights) / n", "of_weights.chunk(n)[ctx.rank].clone()")],
        ),
        Mistake(
            "outputs-for-inputs",
            (
                "From which `x` do you compute a layer again in the backward?",
                "A layer's backward needs the input that it had in the forward. After `x = layer(...)` that name is "
                "the output: remember the input before.",
            ),
            [
                (
                    "        inputs.append(x)\n        x = layer(weights, x)\n",
                    "        x = layer(weights, x)\n        inputs.append(x)\n",
                )
            ],
        ),
    ),
    otherwise=(
        "Check the forward first: with the shards of 2 ranks, is the last output that of all parameters on one?",
        "Then one layer's backward: `torch.autograd.grad(layer(weights, x), (weights, x), grad)` gives two "
        "gradients: one is reduce-scattered, the other is the `grad` of the layer before.",
    ),
)

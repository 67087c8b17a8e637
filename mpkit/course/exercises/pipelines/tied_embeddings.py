"""Tied embeddings.

A language model often has one matrix at both ends: it turns tokens into vectors, and vectors into scores of tokens.
Cut such a model into stages, and the first and the last rank each have a copy of that weight. The model has *one*
weight there, whose gradient is the sum of what both places contribute:

    rank 0: embedding ─▶ rank 1 ─▶ ... ─▶ rank p-1: output layer
       gradient  g₀                            gradient g₁            both step with g₀ + g₁

Write what happens after the backward and before the optimizer's step. The ranks in the middle have no copy and no part
in it. Make a group with `ctx.comm.group([...])`: all ranks of the run make a group together, members or not.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021;
Press and Wolf, "Using the Output Embedding to Improve Language Models", EACL 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, payload
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.serial import mlp
from mpkit.course.framework.staged import record_stage


# %% answer
def tied_embeddings(ctx: mk.Context, weight: nn.Parameter | None) -> None:
    """Sum the gradients of the tied weight over the first and the last rank; every rank calls this once per step.

    weight: (words, width), this rank's copy, with its gradient; None on the ranks in the middle.
    """
    ### BEGIN SOLUTION
    group = ctx.comm.group([0, ctx.world_size - 1])
    if weight is not None:
        ctx.comm.all_reduce(weight.grad, group)
    ### END SOLUTION


# %% checks
WORDS, WIDTH, STEPS = 7, 6, 2


def start(case: Case) -> tuple[Tensor, Tensor, Tensor, nn.Sequential]:
    """Return tokens (5,), the next tokens, the tied weight, and the layers in between."""
    generator = case.generator()
    tokens, following = torch.randint(WORDS, (2, 5), generator=generator)
    weight = torch.randn(WORDS, WIDTH, generator=generator, dtype=torch.float64)
    return tokens, following, weight, mlp(case.ranks, case.seed)


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run two steps of naive model parallelism; return this rank's parameters after them."""
    assert callable(answer)
    tokens, following, start_weight, layers = start(case)
    layer, first, last = record_stage(ctx, layers[ctx.rank]), ctx.rank == 0, ctx.rank == ctx.world_size - 1
    weight = nn.Parameter(start_weight) if first or last else None
    optimizer = torch.optim.SGD([*layer.parameters(), *([weight] if weight is not None else [])], lr=0.3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.empty(5, WIDTH, dtype=torch.float64)
        if first:
            assert weight is not None
            x = F.embedding(tokens, weight)
        else:
            ctx.comm.recv(x, ctx.rank - 1).requires_grad_()
        output = layer(x)
        if last:
            assert weight is not None
            F.cross_entropy(output @ weight.T, following).backward()
        else:
            ctx.comm.send(output, ctx.rank + 1)
            output.backward(ctx.comm.recv(torch.empty_like(output), ctx.rank + 1))
        if not first:
            assert x.grad is not None
            ctx.comm.send(x.grad, ctx.rank - 1)
        answer(ctx, weight)
        optimizer.step()
    return {"tied weight": weight if weight is None else weight.detach(), "layer": layer.state_dict()}


def expected(case: Case) -> list[object]:
    """Return the parameters of serial training with one tied weight."""
    tokens, following, start_weight, layers = start(case)
    weight = nn.Parameter(start_weight)
    optimizer = torch.optim.SGD([weight, *layers.parameters()], lr=0.3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(layers(F.embedding(tokens, weight)) @ weight.T, following).backward()
        optimizer.step()
    return [
        {
            "tied weight": weight.detach() if rank in (0, case.ranks - 1) else None,
            "layer": layers[rank].state_dict(),
        }
        for rank in range(case.ranks)
    ]


EXERCISE = OnRanks(
    solution=tied_embeddings,
    cases=(Case(2, 1), Case(3, 2), Case(4, 3)),
    play=play,
    expected=expected,
    result="the parameters after two steps",
    budgets=(
        Budget("collectives that a rank takes part in", collectives, STEPS),
        Budget("bytes of the collectives of a rank", payload, STEPS * WORDS * WIDTH * 8, "bytes"),
    ),
    after="05-real-models",
    place=100,
    start="Who has the weight? Make the group of these two ranks first (on every rank). What should both have in "
    "`weight.grad` before the step?",
    mistakes=(
        Mistake(
            "no-sum",
            (
                "Compare the two copies of the weight after two steps: are they still equal?",
                "Each copy steps with the gradient of its own place only, and they drift apart: they are two weights "
                "now. Add up the two gradients before the step.",
                "An all-reduce of `weight.grad` in the group of ranks 0 and p-1.",
            ),
            """
            def tied_embeddings(ctx: mk.Context, weight: nn.Parameter | None) -> None:
                pass
            """,
        ),
        Mistake(
            "averaged",
            (
                "The copies are equal, and have moved too little. By which factor?",
                "These are not two replicas that saw different samples. It is one weight that is used in two places, "
                "and its gradient is the sum over them, not the mean.",
            ),
            [("weight.grad, group)", "weight.grad, group, op='mean')")],
        ),
        Mistake(
            "all-ranks-of-the-run",
            (
                "Who takes part in an all-reduce without a group, and who has called yours?",
                "Without a group an all-reduce is one of all ranks, and those in the middle never come to it: they "
                "have no such weight. Make a group of the two that do.",
            ),
            [("weight.grad, group)", "weight.grad)")],
            when=lambda seen: seen.case.ranks > 2 and "never came to" in seen.hang,
        ),
        Mistake(
            "forgets-the-ranks-in-the-middle",
            (
                "On which rank does it fail, and what does that rank hold of the tied weight?",
                "A rank in the middle has `None` for a weight. It makes the group with the others, and that is all: "
                "only what is done *in* the group is for its members alone.",
                "`if weight is not None:` before the all-reduce, not before `ctx.comm.group(...)`.",
            ),
            [("    if weight is not None:\n        ctx", "    ctx")],
            when=lambda seen: "NoneType" in seen.error,
        ),
        Mistake(
            "sums-the-weights",
            (
                "What do you add up: gradients, or what the optimizer is about to change?",
                "Both copies are equal before the step. Adding up the weights doubles them; it is the gradients that "
                "differ.",
            ),
            [("weight.grad, group)", "weight.data, group)")],
        ),
    ),
    otherwise=("Compare with serial training: there both places add to one `.grad`.",),
)

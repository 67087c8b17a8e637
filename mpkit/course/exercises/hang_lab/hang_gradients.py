"""Hang: gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case
from mpkit.course.framework.measures import calls, wire
from mpkit.course.framework.on_ranks import OnRanks, call_with
from mpkit.trace import Kind


# %% answer
def average(ctx: mk.Context, layer: nn.Linear, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the mean loss over all ranks' samples.

    layer: equal on all ranks. x, y: this rank's samples, the same number on each rank. Returns the gradients: "weight",
    this rank's rows, and "bias", all of it.
    """
    F.mse_loss(layer(x), y).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    averaged = {}
    ### BEGIN SOLUTION
    # instead: for name in sorted(gradients, key=lambda name: gradients[name].norm(), reverse=True):
    for name in sorted(gradients):
        if name == "weight":
            averaged[name] = ctx.comm.reduce_scatter(gradients[name]) / ctx.world_size
        else:
            averaged[name] = ctx.comm.all_reduce(gradients[name], op="mean")
    # instead:     if name == "weight":
    # instead:         averaged[name] = ctx.comm.reduce_scatter(gradients[name]) / ctx.world_size
    # instead:     else:
    # instead:         averaged[name] = ctx.comm.all_reduce(gradients[name], op="mean")
    ### END SOLUTION
    return averaged


# %% checks
def given(case: Case) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return a layer, and samples for each rank: (ranks, 6, ...). Small inputs make the weight's gradient small."""
    generator = case.generator()
    layer = nn.Linear(3, 2 * case.ranks).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(case.ranks, 6, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(case.ranks, 6, 2 * case.ranks, generator=generator, dtype=torch.float64)
    return layer, x * torch.tensor(([9.0, 0.1] * case.ranks)[: case.ranks]).view(-1, 1, 1), y


def inputs(case: Case, rank: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return the layer, and a rank's samples."""
    layer, x, y = given(case)
    return layer, x[rank], y[rank]


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the serial gradients of all samples at once, the weight's cut into each rank's rows."""
    layer, x, y = given(case)
    F.mse_loss(layer(x.flatten(0, 1)), y.flatten(0, 1)).backward()
    weight, bias = layer.weight.grad, layer.bias.grad
    assert weight is not None and bias is not None
    return [{"weight": rows, "bias": bias} for rows in weight.chunk(case.ranks)]


SENT = "bytes that a rank sends, on a ring"


def enough(case: Case) -> float:
    """Return the bytes of a reduce-scatter of the weight's gradient, and of an all-reduce of the bias's."""
    layer = given(case)[0]
    return (case.ranks - 1) / case.ranks * (layer.weight.nbytes + 2 * layer.bias.nbytes)


EXERCISE = OnRanks(
    solution=average,
    cases=(Case(2, 1), Case(3, 2), Case(4, 3)),
    play=call_with(inputs),
    expected=expected,
    result="the averaged gradients",
    budgets=(Budget(SENT, wire, enough, "bytes"),),
    after="03-zero",
    place=30,
    when={
        "a-barrier": lambda seen: seen.mismatch and calls(Kind.BARRIER)(seen) > 0,
        "another-order-on-each-rank": lambda seen: "reduce_scatter(" in seen.mismatch,
        "one-kind-in-different-orders": lambda seen: seen.mismatch,
        "all-reduced-and-cut": lambda seen: seen.budget == SENT,
    },
)

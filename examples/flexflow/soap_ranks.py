"""What a rank computes to obtain its part of one layer, split by operators, samples, attribute or parameters.

The layer is an `AlgebraicOperator`; the one after it, for the split by operators, is Z = Y C. Every way takes X and
the incoming gradient, ∂Y (or ∂Z), and has two phases:

    forward     the rank's part of Y
    backward    its part of ∂X, and of the gradients of the parameters that it has

Everything is sent through a `Communicator`, within a span that names the phase and the tensor.

Source: Jia, Zaharia, Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 4; the
two ways to split a matrix are those of Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from examples.flexflow.soap_operator import (
    AlgebraicOperator,
    Pieces,
    add_bias,
    cut,
    mine,
    normalize,
    pieces,
    whole,
)
from mpkit.strategies.comm.communicator import Communicator

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


Phase = Callable[[str, str], AbstractContextManager[Any]]
"""A function that opens the span of a phase, in which a tensor is sent."""

Way = Callable[[Communicator, AlgebraicOperator, dict[str, Tensor], Phase], Pieces]
"""Maps the group, the operator, and the whole X, ∂Y, C and ∂Z to the pieces that this rank ends up with."""


# ---- O: operators --------------------------------------------------------------------------------------------


def by_operators(
    axis: Communicator, operator: AlgebraicOperator, given: dict[str, Tensor], phase: Phase
) -> Pieces:
    """Run this operator on rank 0 and the next one on rank 1, pipelined over two micro-batches."""
    x, c = given["X"], given["C"]
    if axis.index == 0:
        boxes = {name: whole(tensor) for name, tensor in operator.parameters.items()}
        held = {name: cut(tensor, boxes[name]) for name, tensor in operator.parameters.items()}
        inputs = [part.clone().requires_grad_() for part in x.tensor_split(2)]
        with phase("forward", "Y"):
            outputs = [operator(part, held) for part in inputs]
            sends = [axis.isend(y.detach(), 1, f"F{m}") for m, y in enumerate(outputs)]
            for send in sends:
                send.wait()
        with phase("backward", "∂Y"):
            for m, y in enumerate(outputs):
                y.backward(axis.irecv(torch.empty_like(y), 1, f"B{m}").wait())
        held_y = torch.cat([y.detach() for y in outputs])
        done = pieces({**boxes, "X": whole(x), "Y": whole(held_y)}, {**held, "Y": held_y, "X": x.detach()})
        done.gradients["X"] = torch.cat([part.grad for part in inputs if part.grad is not None])
        return done
    weight = cut(c, whole(c))
    shapes = [(*part.shape[:-1], c.shape[0]) for part in x.tensor_split(2)]
    with phase("forward", "Y"):
        arrived = [axis.irecv(x.new_empty(shape), 0, f"F{m}").wait() for m, shape in enumerate(shapes)]
        between = [y.requires_grad_() for y in arrived]
        outputs = [y @ weight for y in between]
    with phase("backward", "∂Y"):
        for m, (z, dz) in enumerate(zip(outputs, given["∂Z"].tensor_split(2), strict=True)):
            z.backward(dz)
            back = between[m].grad
            assert back is not None
            axis.isend(back, 0, f"B{m}").wait()
    y, z = torch.cat([y.detach() for y in between]), torch.cat([z.detach() for z in outputs])
    return pieces({"C": whole(c), "Y": whole(y), "Z": whole(z)}, {"C": weight, "Y": y, "Z": z})


# ---- S and A: rows of X --------------------------------------------------------------------------------------


def by_samples(
    axis: Communicator, operator: AlgebraicOperator, given: dict[str, Tensor], phase: Phase
) -> Pieces:
    """Split the samples: each rank has all parameters, whose gradients are summed over the ranks."""
    return _rows(axis, operator, given, phase, dim=0)


def by_attribute(
    axis: Communicator, operator: AlgebraicOperator, given: dict[str, Tensor], phase: Phase
) -> Pieces:
    """Split the positions of every sample: each rank has all parameters, and neither layer mixes positions."""
    return _rows(axis, operator, given, phase, dim=1)


def _rows(
    axis: Communicator, operator: AlgebraicOperator, given: dict[str, Tensor], phase: Phase, dim: int
) -> Pieces:
    x, dy = given["X"], given["∂Y"]
    boxes = {name: whole(tensor) for name, tensor in operator.parameters.items()}
    held = {name: cut(tensor, boxes[name]) for name, tensor in operator.parameters.items()}
    x_r = cut(x, mine(x, dim, axis))
    with phase("forward", ""):
        y_r = operator(x_r, held)
    with phase("backward", operator.names):
        y_r.backward(cut(dy, mine(dy, dim, axis)))
        gradients = [tensor.grad for tensor in held.values() if tensor.grad is not None]
        bucket = axis.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, summed in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))
    return pieces({**boxes, "X": mine(x, dim, axis), "Y": mine(dy, dim, axis)}, {**held, "X": x_r, "Y": y_r})


# ---- P: parameters -------------------------------------------------------------------------------------------


def by_columns(
    axis: Communicator, operator: AlgebraicOperator, given: dict[str, Tensor], phase: Phase
) -> Pieces:
    """Split A = [A0 A1] by columns: each rank keeps its columns of A and of Y."""
    return _columns(axis, operator, given, phase, gather=False)


def by_columns_gathered(
    axis: Communicator, operator: AlgebraicOperator, given: dict[str, Tensor], phase: Phase
) -> Pieces:
    """Split A = [A0 A1] by columns, and gather all columns of Y on every rank."""
    return _columns(axis, operator, given, phase, gather=True)


def _columns(
    axis: Communicator, operator: AlgebraicOperator, given: dict[str, Tensor], phase: Phase, gather: bool
) -> Pieces:
    x, dy = given["X"], given["∂Y"]
    boxes = {name: mine(tensor, -1, axis) for name, tensor in operator.parameters.items()}
    held = {name: cut(tensor, boxes[name]) for name, tensor in operator.parameters.items()}
    x_r = cut(x, whole(x))
    with phase("forward", "Y"):
        y_r = operator(x_r, held)
        y = y_r.detach()
        if gather:  # the ranks' parts are concatenated along the first dimension
            y = axis.all_gather(y.movedim(-1, 0).contiguous()).movedim(0, -1)
    with phase("backward", "∂X"):
        y_r.backward(cut(dy, mine(dy, -1, axis)))
        assert x_r.grad is not None
        axis.all_reduce(x_r.grad)
    box = whole(dy) if gather else mine(dy, -1, axis)
    return pieces({**boxes, "X": whole(x), "Y": box}, {**held, "X": x_r, "Y": y})


def by_rows(
    axis: Communicator, operator: AlgebraicOperator, given: dict[str, Tensor], phase: Phase
) -> Pieces:
    """Split X = [X0 X1] by columns and A = [A0; A1] by rows: Y = X0 A0 + X1 A1 is summed over the ranks."""
    x, dy = given["X"], given["∂Y"]
    parameters = operator.parameters
    boxes = {name: mine(p, 0, axis) if name == "A" else whole(p) for name, p in parameters.items()}
    held = {name: cut(tensor, boxes[name]) for name, tensor in parameters.items()}
    x_r = cut(x, mine(x, -1, axis))
    with phase("forward", "Y"):
        part = x_r @ held["A"]
        summed = axis.all_reduce(part.detach().clone())
        y = add_bias(summed, held, "b")  # the bias is added once, after the sum
    with phase("backward", ""):
        part.backward(dy)
        if "b" in held:
            held["b"].grad = dy.sum((0, 1))
    return pieces({**boxes, "X": mine(x, -1, axis), "Y": whole(dy)}, {**held, "X": x_r, "Y": y})


def by_statistics(
    axis: Communicator, operator: AlgebraicOperator, given: dict[str, Tensor], phase: Phase
) -> Pieces:
    """Split X, γ and β by columns: μ and σ² are over all columns, so the ranks exchange sums.

    With x̂ = (x - μ) / √(σ² + ε) and g = γ ∂y, the backward needs two sums as well:
    ∂x = (g - mean(g) - x̂ mean(g x̂)) / √(σ² + ε).
    """
    x, dy = given["X"], given["∂Y"]
    n = x.shape[-1]
    boxes = {name: mine(tensor, -1, axis) for name, tensor in operator.parameters.items()}
    held = {name: cut(tensor, boxes[name]).detach() for name, tensor in operator.parameters.items()}
    x_r, dy_r = cut(x, mine(x, -1, axis)).detach(), cut(dy, mine(dy, -1, axis)).detach()
    with phase("forward", "Σx, Σx²"):
        sums = axis.all_reduce(torch.stack([x_r.sum(-1), x_r.square().sum(-1)]))  # two numbers per row
        mean = sums[0] / n
        variance = sums[1] / n - mean.square()
        hat = normalize(x_r, mean, variance, operator.eps)
        y_r = add_bias(held["γ"] * hat, held, "β")
    with phase("backward", "Σg, Σg·x̂"):
        g = held["γ"] * dy_r
        sums = axis.all_reduce(torch.stack([g.sum(-1), (g * hat).sum(-1)]))  # again two numbers per row
        of_mean, of_spread = (sums / n)[..., None]
        dx_r = (g - of_mean - hat * of_spread) * torch.rsqrt(variance + operator.eps)[..., None]
    gradients = {"X": dx_r, "γ": (dy_r * hat).sum((0, 1)), "β": dy_r.sum((0, 1))}
    boxes |= {"X": mine(x, -1, axis), "Y": mine(dy, -1, axis)}
    return Pieces(boxes, {**held, "X": x_r, "Y": y_r}, {name: gradients[name] for name in ("X", *held)})


WAYS: dict[str, dict[str, Way]] = {
    "linear": {
        "O": by_operators,
        "S": by_samples,
        "A": by_attribute,
        "P columns": by_columns,
        "P columns, gathered": by_columns_gathered,
        "P rows": by_rows,
    },
    "layer_norm": {"O": by_operators, "S": by_samples, "A": by_attribute, "P": by_statistics},
}


def on_a_rank(context: Context, operator: AlgebraicOperator, given: dict[str, Tensor]) -> dict[str, Pieces]:
    """Split the operator in every possible way, one after the other; return this rank's pieces by way."""
    axis = context.comm
    here = {name: tensor.to(context.device) for name, tensor in given.items()}
    parameters = {name: tensor.to(context.device) for name, tensor in operator.parameters.items()}
    local = AlgebraicOperator(operator.kind, parameters, operator.eps)
    outcome = {}
    for name, way in WAYS[operator.kind].items():

        def phase(of: str, what: str, name: str = name) -> AbstractContextManager[Any]:
            return context.record.span("|".join((name, of, what)))

        done = way(axis, local, here, phase)
        outcome[name] = Pieces(
            done.boxes,
            {tensor: value.cpu() for tensor, value in done.values.items()},
            {tensor: value.cpu() for tensor, value in done.gradients.items()},
        )
    return outcome

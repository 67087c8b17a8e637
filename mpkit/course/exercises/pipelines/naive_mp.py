"""Naive model parallelism."""

from mpkit.course.author import *
from mpkit.course.framework.serial import mlp


# %% answer
def naive_mp(ctx: mk.Context, stage: nn.Module, x: Tensor, y: Tensor) -> None:
    """Run the forward and backward of one batch; leave the gradients in `stage`'s parameters.

    stage: this rank's part of the model; takes and gives (batch, width).
    x: (batch, width): on rank 0 the inputs; elsewhere a buffer of the same shape and dtype, to receive into.
    y: (batch, width): on the last rank the targets of F.mse_loss; elsewhere a buffer, likewise.
    """
    ### BEGIN SOLUTION
    first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
    # forward
    if not first:
        x = ctx.comm.recv(x, ctx.rank - 1).requires_grad_()
    output = stage(x)
    # backward
    if last:
        F.mse_loss(output, y).backward()
    else:
        ctx.comm.send(output, ctx.rank + 1)
        output.backward(ctx.comm.recv(y, ctx.rank + 1))
    if not first:
        ctx.comm.send(x.grad, ctx.rank - 1)
    ### END SOLUTION


# %% checks
def batch(case: Case) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (5, 6) each."""
    x, y = torch.randn(2, 5, 6, generator=case.generator(), dtype=torch.float64)
    return x, y


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run one batch; return the gradients of this rank's stage."""
    stage = mlp(2 * case.ranks, case.seed)[2 * ctx.rank : 2 * ctx.rank + 2]
    x, y = batch(case)
    x = x if ctx.rank == 0 else torch.full_like(x, torch.nan)
    y = y if ctx.rank == ctx.world_size - 1 else torch.full_like(y, torch.nan)
    answer(ctx, record_stage(ctx, stage), x, y)
    return {name: parameter.grad for name, parameter in stage.named_parameters()}


def expected(case: Case) -> list[object]:
    """Return the gradients of serial training, by stage."""
    model = mlp(2 * case.ranks, case.seed)
    x, y = batch(case)
    F.mse_loss(model(x), y).backward()
    stages = [model[2 * rank : 2 * rank + 2] for rank in range(case.ranks)]
    return [{name: parameter.grad for name, parameter in stage.named_parameters()} for stage in stages]


EXERCISE = OnRanks(
    cases=(Case(2, 1), Case(3, 2), Case(4, 3)), budgets=(Budget("messages that a rank sends", messages, 2),)
)

"""Hang: pairs."""

from mpkit.course.author import *


# %% answer
def train_step(ctx: mk.Context, stage: nn.Linear, x: Tensor, y: Tensor) -> dict[str, object]:
    """Run one forward and one backward of two pipelines.

    stage: this rank's, of d inputs and d outputs. x, y: (b, d), this replica's samples. Returns "loss", the mean over
    the replicas (None on the first stage), and "gradient", of this stage's weight, averaged over the replicas.
    """
    groups = [ctx.comm.group(ranks) for ranks in ([0, 1], [2, 3])]  # every rank makes all groups
    replicas = groups[ctx.rank // 2]  # the ranks that have the same stage as this one
    loss = None
    if ctx.rank < 2:
        hidden = stage(x)
        ctx.comm.send(hidden, ctx.rank + 2)
        hidden.backward(ctx.comm.recv(torch.empty_like(hidden), ctx.rank + 2))
    else:
        hidden = ctx.comm.recv(torch.empty_like(x), ctx.rank - 2).requires_grad_()
        loss = F.mse_loss(stage(hidden), y)
        loss.backward()
        ### BEGIN SOLUTION
        # instead: loss = ctx.comm.all_reduce(loss.detach(), op="mean")
        loss = replicas.all_reduce(loss.detach(), op="mean")
        ### END SOLUTION
        ctx.comm.send(hidden.grad, ctx.rank - 2)
    gradient = replicas.all_reduce(stage.weight.grad, op="mean")
    return {"loss": loss, "gradient": gradient}


# %% checks
def given(case: Case) -> tuple[list[nn.Linear], Tensor, Tensor]:
    """Return both stages, and the samples of both replicas."""
    generator = case.generator()
    stages = [nn.Linear(3, 3).double() for _ in range(2)]
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x, y = torch.randn(2, case["samples"], 3, generator=generator, dtype=torch.float64)
    return stages, x, y


def inputs(case: Case, rank: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return a rank's stage, and its replica's samples."""
    stages, x, y = given(case)
    return stages[rank // 2], x.chunk(2)[rank % 2], y.chunk(2)[rank % 2]


def expected(case: Case) -> list[dict[str, object]]:
    """Return the loss and the gradients of serial training with all samples."""
    stages, x, y = given(case)
    loss = F.mse_loss(nn.Sequential(*stages)(x), y)
    gradients = torch.autograd.grad(loss, [stage.weight for stage in stages])
    return [
        {"loss": loss.detach() if rank > 1 else None, "gradient": gradients[rank // 2]} for rank in range(4)
    ]


EXERCISE = OnRanks(cases=(Case(4, 1, {"samples": 10}), Case(4, 2, {"samples": 6})), play=call_with(inputs))

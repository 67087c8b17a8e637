"""Tied embeddings."""

from mpkit.course.author import *
from mpkit.course.framework.serial import mlp


# %% answer
def tied_embeddings(ctx: mk.Context, weight: nn.Parameter | None) -> None:
    """Sum the gradients of the tied weight over the first and the last rank; every rank calls this once per step.

    weight: (words, width), this rank's copy, with its gradient; None on the ranks in the middle.
    """
    ### BEGIN SOLUTION
    group = ctx.comm.group([0, ctx.world_size - 1])
    if weight is not None:
        group.all_reduce(weight.grad)
    ### END SOLUTION


# %% checks
WORDS, WIDTH, STEPS = 7, 6, 2


def start(case: Case) -> tuple[Tensor, Tensor, Tensor, nn.Sequential]:
    """Return tokens (5,), the next tokens, the tied weight, and the layers in between."""
    generator = case.generator()
    tokens, following = torch.randint(WORDS, (2, 5), generator=generator)
    weight = torch.randn(WORDS, WIDTH, generator=generator, dtype=torch.float64)
    return tokens, following, weight, mlp(case.ranks, case.seed)


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run two steps of naive model parallelism; return this rank's parameters after them."""
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
    cases=(Case(2, 1), Case(3, 2), Case(4, 3)),
    budgets=(
        Budget("collectives that a rank takes part in", collectives, STEPS),
        Budget("bytes of the collectives of a rank", payload, STEPS * WORDS * WIDTH * 8, "bytes"),
    ),
)

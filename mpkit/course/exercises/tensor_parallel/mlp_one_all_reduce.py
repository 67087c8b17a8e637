"""The MLP with one all-reduce."""

from mpkit.course.author import *
from mpkit.course.exercises.tensor_parallel import gradients, operator


# %% given
def f(ctx: mk.Context, x: Tensor) -> Tensor:
    """Apply Megatron's f: the identity in the forward, an all-reduce in the backward."""
    return operator(x, lambda x: x, lambda dx: ctx.comm.all_reduce(dx))


def g(ctx: mk.Context, y: Tensor) -> Tensor:
    """Apply Megatron's g: an all-reduce in the forward, the identity in the backward."""
    return operator(y, lambda y: ctx.comm.all_reduce(y), lambda dy: dy)


# %% answer
def mlp(ctx: mk.Context, x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """Compute `down(F.gelu(up(x)))`, [b, h] -> [b, h], an n-th on each rank; the result is the same on every rank.

    up: [h -> k], down: [k -> h], whole on every rank; n divides k. Use an n-th of both, this rank's.
    """
    ### BEGIN SOLUTION
    n, r = ctx.world_size, ctx.rank
    a, a_bias = up.weight.chunk(n, 0)[r], up.bias.chunk(n)[r]
    b = down.weight.chunk(n, 1)[r]
    y = F.gelu(F.linear(f(ctx, x), a, a_bias))
    return g(ctx, F.linear(y, b)) + down.bias
    ### END SOLUTION


# %% checks
ROWS, H, K = 4, 5, 12
CUT = ("gradient of up.weight", "gradient of up.bias", "gradient of down.weight")
WORKED = "numbers between the layers that a rank computes"
CALLS, SENT = "collectives, of forward and backward together", "bytes of collectives"
Linears = tuple[nn.Linear, nn.Linear]


def whole(case: Case) -> tuple[Tensor, Tensor, Linears]:
    """Return X, the gradient of Z, and both layers."""
    generator = case.generator(5)
    x, dz = torch.randn(2, ROWS, H, generator=generator, dtype=torch.float64)
    up, down = nn.Linear(H, K, dtype=torch.float64), nn.Linear(K, H, dtype=torch.float64)
    for parameter in (*up.parameters(), *down.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), dz, (up, down)


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run this rank's forward and backward with the answer."""
    x, dz, (up, down) = whole(case)
    z = answer(ctx, x, up, down)
    z.backward(dz)
    return {"z": z.detach(), **gradients(x, up=up, down=down)}


def expected(case: Case) -> list[dict[str, Tensor | None]]:
    """Return the results of the serial MLP, and how many numbers between the layers are a rank's."""
    x, dz, (up, down) = whole(case)
    z = down(torch.nn.functional.gelu(up(x)))
    z.backward(dz)
    return [{"z": z.detach(), **gradients(x, up=up, down=down), WORKED: K // case.ranks}] * case.ranks


def together(case: Case, results: list[dict[str, Tensor]]) -> list[dict[str, object]]:
    """Add up the gradients of what is cut, over ranks; count the numbers between the layers that a rank computes."""
    cut = {name: sum(one[name] for one in results) for name in CUT}
    rows = [
        (one["gradient of up.weight"] != 0).any(1) | (one["gradient of down.weight"] != 0).any(0)
        for one in results
    ]
    return [{**one, **cut, WORKED: int(row.sum())} for one, row in zip(results, rows, strict=True)]


EXERCISE = OnRanks(
    cases=(Case(2, seed=31), Case(3, seed=32), Case(4, seed=33)),
    budgets=(Budget(CALLS, collectives, 2), Budget(SENT, payload, 2 * ROWS * H * 8, "bytes")),
)

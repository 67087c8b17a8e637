"""Attention by heads."""

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
def attention(ctx: mk.Context, x: Tensor, qkv: nn.Linear, out: nn.Linear, heads: int) -> Tensor:
    """Compute causal self-attention, [b, s, h] -> [b, s, h], of which each rank does heads / n heads.

    qkv: [h -> 3h], out: [h -> h], whole on every rank; n divides heads. On one rank it would be

        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out(y.transpose(1, 2).flatten(2))
    """
    n, r = ctx.world_size, ctx.rank
    ### BEGIN SOLUTION
    x = f(ctx, x)
    weights = [part.chunk(n)[r] for part in qkv.weight.chunk(3)]
    biases = [part.chunk(n)[r] for part in qkv.bias.chunk(3)]
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (heads // n, -1)).transpose(1, 2)
        for weight, bias in zip(weights, biases, strict=True)
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return g(ctx, F.linear(y.transpose(1, 2).flatten(2), out.weight.chunk(n, 1)[r])) + out.bias
    ### END SOLUTION


# %% checks
B, S, H = 2, 5, 12
CUT = ("gradient of qkv.weight", "gradient of qkv.bias", "gradient of out.weight")
WORKED = "rows of qkv.weight that a rank computes with"
CALLS, SENT = "collectives, of forward and backward together", "bytes of collectives"
Linears = tuple[nn.Linear, nn.Linear]


def whole(case: Case) -> tuple[Tensor, Tensor, Linears]:
    """Return X, the gradient of the result, and both layers."""
    generator = case.generator(5)
    x, dz = torch.randn(2, B, S, H, generator=generator, dtype=torch.float64)
    qkv, out = nn.Linear(H, 3 * H, dtype=torch.float64), nn.Linear(H, H, dtype=torch.float64)
    for parameter in (*qkv.parameters(), *out.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return x.requires_grad_(), dz, (qkv, out)


def attend_serially(x: Tensor, qkv: nn.Linear, out: nn.Linear, heads: int) -> Tensor:
    """Compute all heads on one rank."""
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    result: Tensor = out(y.transpose(1, 2).flatten(2))
    return result


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run this rank's forward and backward with the answer."""
    x, dz, (qkv, out) = whole(case)
    z = answer(ctx, x, qkv, out, case["heads"])
    z.backward(dz)
    return {"result": z.detach(), **gradients(x, qkv=qkv, out=out)}


def expected(case: Case) -> list[dict[str, Tensor | int | None]]:
    """Return the results of all heads on one rank, and how many rows of `qkv.weight` are a rank's."""
    x, dz, (qkv, out) = whole(case)
    z = attend_serially(x, qkv, out, case["heads"])
    z.backward(dz)
    return [
        {"result": z.detach(), **gradients(x, qkv=qkv, out=out), WORKED: 3 * H // case.ranks}
    ] * case.ranks


def together(case: Case, results: list[dict[str, Tensor]]) -> list[dict[str, object]]:
    """Add up the gradients of what is cut, over ranks; count the rows of qkv.weight that a rank computes with."""
    cut = {name: sum(one[name] for one in results) for name in CUT}
    rows = [int((one["gradient of qkv.weight"] != 0).any(1).sum()) for one in results]
    return [{**one, **cut, WORKED: number} for one, number in zip(results, rows, strict=True)]


EXERCISE = OnRanks(
    cases=(
        Case(2, seed=41, sizes={"heads": 4}),
        Case(3, seed=42, sizes={"heads": 6}),
        Case(4, seed=43, sizes={"heads": 4}),
    ),
    budgets=(Budget(CALLS, collectives, 2), Budget(SENT, payload, 2 * B * S * H * 8, "bytes")),
)

"""Ulysses: all-to-all between sequence and heads."""

from mpkit.course.author import *
from mpkit.course.exercises.sequences_and_experts import exchange


# %% answer
def ulysses(ctx: mk.Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention of this rank's part of the sequence over all of it, [b, s/n, H, d].

    q, k, v: [b, s/n, H, d], of this rank's part of the sequence. (F.scaled_dot_product_attention takes [b, H, s, d].)
    """
    n = ctx.world_size
    ### BEGIN SOLUTION
    whole = []
    for x in (q, k, v):
        parts = torch.stack(x.chunk(n, 2))  # [n, b, s/n, H/n, d], by heads
        came = exchange(ctx, parts)  # [n, b, s/n, H/n, d], by sequence
        whole.append(torch.cat(list(came), 1).transpose(1, 2))  # [b, H/n, s, d]
    y = F.scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True).transpose(1, 2)
    parts = torch.stack(y.chunk(n, 1))  # by sequence
    return torch.cat(list(exchange(ctx, parts)), 2)  # by heads
    ### END SOLUTION


# %% checks
B, LENGTH, D = 2, 3, 4
CALLS, SENT = "collectives, of forward and backward together", "bytes of collectives"


def whole(case: Case) -> tuple[list[Tensor], Tensor]:
    """Return queries, keys and values of the whole sequence, and the gradient of the result."""
    shape = (4, B, LENGTH * case.ranks, case["heads"], D)
    *inputs, dy = torch.randn(shape, generator=case.generator(), dtype=torch.float64)
    return inputs, dy


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the attention, and the gradients of this rank's queries, keys and values."""
    inputs, dy = whole(case)
    mine = [x.chunk(case.ranks, 1)[ctx.rank].clone().requires_grad_() for x in inputs]
    y = answer(ctx, *mine)
    y.backward(dy.chunk(case.ranks, 1)[ctx.rank])
    return {
        "result": y.detach(),
        **{f"gradient of {name}": x.grad for name, x in zip("qkv", mine, strict=True)},
    }


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the parts of the attention over the whole sequence, and of its gradients."""
    inputs, dy = whole(case)
    inputs = [x.clone().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    grads = torch.autograd.grad(y, inputs, dy)
    named = {"result": y.detach(), **{f"gradient of {name}": x for name, x in zip("qkv", grads, strict=True)}}
    return [{name: x.chunk(case.ranks, 1)[rank] for name, x in named.items()} for rank in range(case.ranks)]


EXERCISE = OnRanks(
    cases=(Case(2, 81, {"heads": 2}), Case(2, 82, {"heads": 6}), Case(4, 83, {"heads": 4})),
    budgets=(
        Budget(CALLS, collectives, 8),
        Budget(SENT, payload, lambda case: 8 * B * LENGTH * case["heads"] * D * 8, "bytes"),
    ),
)

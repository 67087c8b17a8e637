"""Cut a matrix by columns."""

from mpkit.course.author import *
from mpkit.course.exercises.tensor_parallel import operator


# %% answer
def column_parallel(ctx: mk.Context, x: Tensor, a: Tensor) -> Tensor:
    """Return this rank's columns of Y = XA, [b, k_i].

    x: [b, h], the same on every rank. a: [h, k_i], this rank's columns of A; ranks may have more or fewer.
    After `y.backward(...)`, x.grad has to be the gradient of all of Y, the same on every rank.
    """

    def f(x: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        return operator(x, lambda x: x, lambda dx: ctx.comm.all_reduce(dx))
        ### END SOLUTION

    ### BEGIN SOLUTION
    return f(x) @ a
    ### END SOLUTION


# %% checks
ROWS, H = 4, 5
SENT = "bytes of collectives"


def whole(case: Case) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return X, each rank's columns of A, and the gradients of each rank's columns of Y."""
    generator = case.generator(5)
    x = torch.randn(ROWS, H, generator=generator, dtype=torch.float64)
    parts = [torch.randn(H, 2 + r, generator=generator, dtype=torch.float64) for r in range(case.ranks)]
    grads = [torch.randn(ROWS, 2 + r, generator=generator, dtype=torch.float64) for r in range(case.ranks)]
    return x, parts, grads


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run this rank's forward and backward with the answer."""
    x, parts, grads = whole(case)
    x, a = x.requires_grad_(), parts[ctx.rank].requires_grad_()
    y = answer(ctx, x, a)
    y.backward(grads[ctx.rank])
    return {"y": y.detach(), "gradient of x": x.grad, "gradient of a": a.grad}


def expected(case: Case) -> list[dict[str, Tensor | None]]:
    """Return the same, computed with all columns on one device."""
    x, parts, grads = whole(case)
    a = torch.cat(parts, 1).requires_grad_()
    x.requires_grad_()
    y = x @ a
    y.backward(torch.cat(grads, 1))
    sizes = [part.shape[1] for part in parts]
    assert a.grad is not None
    return [
        {"y": of_y, "gradient of x": x.grad, "gradient of a": of_a}
        for of_y, of_a in zip(y.detach().split(sizes, 1), a.grad.split(sizes, 1), strict=True)
    ]


EXERCISE = OnRanks(
    cases=(Case(2, seed=11), Case(3, seed=12), Case(4, seed=13)),
    budgets=(Budget("collectives", collectives, 1), Budget(SENT, payload, ROWS * H * 8, "bytes")),
)

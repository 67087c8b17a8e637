"""Sequence parallel."""

from mpkit.course.author import *
from mpkit.course.exercises.tensor_parallel import operator


# %% given
def f(ctx: mk.Context, x: Tensor) -> Tensor:
    """Apply Megatron's f: the identity in the forward, an all-reduce in the backward."""
    return operator(x, lambda x: x, lambda dx: ctx.comm.all_reduce(dx))


# %% answer
def sequence_parallel(
    ctx: mk.Context, x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """Return this rank's part of X + GeLU(norm(X) A) B, [s/t, batch, h].

    x: [s/t, batch, h], its part of the sequence. weight, bias: [h], of the layer norm, the same on every rank.
    a: [h, k_i], its columns of A. b: [k_i, h], its rows of B.
    """

    def f_bar(x: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        return operator(x, lambda x: ctx.comm.all_gather(x), lambda dy: ctx.comm.reduce_scatter(dy))
        ### END SOLUTION

    def g_bar(y: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        return operator(y, lambda y: ctx.comm.reduce_scatter(y), lambda dz: ctx.comm.all_gather(dz))
        ### END SOLUTION

    ### BEGIN SOLUTION
    normed = F.layer_norm(x, x.shape[-1:], f(ctx, weight), f(ctx, bias))
    return x + g_bar(F.gelu(f_bar(normed) @ a) @ b)
    ### END SOLUTION


# %% checks
LENGTH, BATCH, H = 24, 2, 6
WHOLE = LENGTH * BATCH * H * 8
CALLS, SENT, HELD = (
    "collectives",
    "bytes that a rank sends, on a ring",
    "bytes of activations kept for the backward",
)


def inputs(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """Return the whole input and parameters, by name, and the gradient of the result."""
    generator = case.generator(5)
    shapes = {
        "x": (LENGTH, BATCH, H),
        "weight": (H,),
        "bias": (H,),
        "a": (H, case.ranks),
        "b": (case.ranks, H),
    }
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    return weights, torch.randn(LENGTH, BATCH, H, generator=generator, dtype=torch.float64)


def part(name: str, tensor: Tensor, case: Case, rank: int) -> Tensor:
    """Return the part of a whole tensor that a rank has."""
    if name in ("weight", "bias"):
        return tensor.clone()
    return tensor.chunk(case.ranks, 1 if name == "a" else 0)[rank].clone()


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run this rank's forward and backward with the answer."""
    whole, dz = inputs(case)
    mine = {name: part(name, each, case, ctx.rank).requires_grad_() for name, each in whole.items()}
    of_mine = part("x", dz, case, ctx.rank)
    saved: dict[int, int] = {}  # bytes, by storage

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        z = answer(ctx, *mine.values())
    for each in mine.values():
        saved.pop(each.untyped_storage().data_ptr(), None)
    with ctx.record.span("backward", nbytes=sum(saved.values())):
        z.backward(of_mine)
    return {"result": z.detach(), **{f"gradient of {name}": each.grad for name, each in mine.items()}}


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return each rank's part of the same, computed on one device."""
    whole, dz = inputs(case)
    x, weight, bias, a, b = (each.requires_grad_() for each in whole.values())
    z = x + F.gelu(F.layer_norm(x, (H,), weight, bias) @ a) @ b
    grads = torch.autograd.grad(z, (x, weight, bias, a, b), dz)
    return [
        {
            "result": part("x", z.detach(), case, rank),
            **{
                f"gradient of {name}": part(name, grad, case, rank)
                for name, grad in zip(whole, grads, strict=True)
            },
        }
        for rank in range(case.ranks)
    ]


def kept(seen: Seen) -> float:
    """Return the bytes of activations that the fullest rank saves for its backward."""
    return max(float(rank.ops["bytes"][rank.ops["kind"] == Kind.COMPUTE].max()) for rank in seen.ranks)


def sent(case: Case) -> float:
    """Return the bytes to send: four times the whole sequence, and two all-reduces of [h]."""
    return (4 * WHOLE + 4 * H * 8) * (case.ranks - 1) / case.ranks


EXERCISE = OnRanks(
    cases=(Case(2, seed=61), Case(3, seed=62), Case(4, seed=63)),
    budgets=(
        Budget(CALLS, collectives, 6),
        Budget(SENT, ring, sent, "bytes"),
        Budget(HELD, kept, lambda case: (1.35 + 3 / case.ranks) * WHOLE, "bytes"),
    ),
)

"""Micro-batch × micro-batches × dp = batch."""

from mpkit.course.author import *
from mpkit.course.framework.serial import mlp
from mpkit.plan.mesh import Mesh


# %% answer
def micro_batches(rank: int, pp: int, dp: int, tp: int, batch: int, microbatches: int) -> list[list[int]]:
    """Return this rank's micro-batches: for each the numbers of its samples, out of 0 to batch - 1.

    Raises:
        ValueError: dp × microbatches does not divide the batch.
    """
    ### BEGIN SOLUTION
    size, rest = divmod(batch, dp * microbatches)
    if rest:
        raise ValueError(f"{batch} samples cannot be cut into {dp} x {microbatches} equal micro-batches")
    replica = rank // tp % dp
    samples = range(replica * microbatches * size, (replica + 1) * microbatches * size)
    return [list(samples[i * size : (i + 1) * size]) for i in range(microbatches)]
    ### END SOLUTION


# %% checks
def data(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, and the inputs and targets of the whole batch."""
    x, y = torch.randn(2, case["batch"], 6, generator=case.generator(), dtype=torch.float64)
    return mlp(2, case.seed), x, y


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the micro-batches' sizes, who else has the same samples, how often each is used, and the gradient."""
    shape = {axis: case[axis] for axis in ("pp", "dp", "tp")}
    mesh = Mesh(**shape)
    made = {axes: [ctx.comm.group(ranks) for ranks in mesh.groups(*axes)] for axes in (("dp",), ("pp", "tp"))}
    along = {axes: next(g for g in groups if ctx.rank in g.ranks) for axes, groups in made.items()}
    # ---- cut
    try:
        cut = answer(ctx.rank, *shape.values(), case["batch"], case["microbatches"])
    except ValueError:
        return "refused"
    cut = [[int(sample) for sample in each] for each in cut]
    model, x, y = data(case)
    used = torch.zeros(case["batch"], dtype=torch.float64)
    for sample in (sample for each in cut for sample in each):
        if not 0 <= sample < case["batch"]:
            raise IndexError(f"there is no sample {sample}: the batch has 0 to {case['batch'] - 1}")
        used[sample] += 1
    # ---- gradient
    for each in cut:
        torch.autograd.backward(F.mse_loss(model(x[each]), y[each]) / len(cut))
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    gradient = along["dp",].all_reduce(flat, op="mean")
    # ---- who has what
    of_replica = along["pp", "tp"].all_reduce(used.clone(), op="mean")
    return {
        "samples in each micro-batch": [len(each) for each in cut],
        "the same samples along pp and tp": torch.equal(of_replica, used),
        "how often a sample is used": along["dp",].all_reduce(used),
        "gradient": gradient,
    }


def expected(case: Case) -> list[object]:
    """Return what is right: each sample is used once, and the gradient is that of serial training."""
    size, rest = divmod(case["batch"], case["dp"] * case["microbatches"])
    if rest:
        return ["refused"] * case.ranks
    model, x, y = data(case)
    torch.autograd.backward(F.mse_loss(model(x), y))
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    one = {
        "samples in each micro-batch": [size] * case["microbatches"],
        "the same samples along pp and tp": True,
        "how often a sample is used": torch.ones(case["batch"], dtype=torch.float64),
        "gradient": gradient,
    }
    return [one] * case.ranks


EXERCISE = OnRanks(
    cases=(
        Case(2, 1, {"pp": 1, "dp": 2, "tp": 1, "batch": 12, "microbatches": 3}),
        Case(4, 2, {"pp": 1, "dp": 2, "tp": 2, "batch": 16, "microbatches": 2}),
        Case(2, 3, {"pp": 1, "dp": 2, "tp": 1, "batch": 14, "microbatches": 3}),
        Case(
            2, 5, {"pp": 1, "dp": 2, "tp": 1, "batch": 12, "microbatches": 4}
        ),  # both divide it, their product not
        Case(3, 6, {"pp": 1, "dp": 3, "tp": 1, "batch": 12, "microbatches": 2}),
        Case(8, 4, {"pp": 2, "dp": 2, "tp": 2, "batch": 24, "microbatches": 3}),
    )
)

"""Micro-batch × micro-batches × dp = batch.

A step takes one global batch. It is cut twice: among the replicas, and each replica's share into micro-batches, which
go through its pipeline one after the other:

    batch 24  =  dp 2  ×  microbatches 3  ×  4 samples in a micro-batch

Every sample is used once. The ranks of one replica, along pp and tp, work on the same samples: they hold parts of one
model. Ranks are laid out as pp × dp × tp, tp fastest (see the mesh exercise).

Return this rank's micro-batches as lists of sample numbers. A batch that cannot be cut evenly is refused with a
ValueError: a silent remainder would be lost, or weigh more than its share.

Each rank then computes the gradient of the mean loss over its micro-batches, and it is averaged over the replicas: the
mean over all of the batch, as serial training has it.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.1 and 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the micro-batches' sizes, who else has the same samples, how often each is used, and the gradient."""
    assert callable(answer)
    mesh = Mesh(pp=case["pp"], dp=case["dp"], tp=case["tp"])
    made = {axes: [ctx.comm.group(ranks) for ranks in mesh.groups(*axes)] for axes in (("dp",), ("pp", "tp"))}
    along = {axes: next(g for g in groups if ctx.rank in g.ranks) for axes, groups in made.items()}
    # ---- cut
    try:
        cut = answer(ctx.rank, *mesh_shape(case), case["batch"], case["microbatches"])
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
    gradient = ctx.comm.all_reduce(flat, along["dp",], op="mean")
    # ---- who has what
    of_replica = ctx.comm.all_reduce(used.clone(), along["pp", "tp"], op="mean")
    return {
        "samples in each micro-batch": [len(each) for each in cut],
        "the same samples along pp and tp": torch.equal(of_replica, used),
        "how often a sample is used": ctx.comm.all_reduce(used, along["dp",]),
        "gradient": gradient,
    }


def mesh_shape(case: Case) -> tuple[int, int, int]:
    """Return the degrees (pp, dp, tp)."""
    return case["pp"], case["dp"], case["tp"]


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


def accepted(seen: Seen) -> bool:
    """Return whether a batch that cannot be cut evenly was cut."""
    return seen.is_finished and seen.expected[0] == "refused"


EXERCISE = OnRanks(
    solution=micro_batches,
    cases=(
        Case(2, 1, {"pp": 1, "dp": 2, "tp": 1, "batch": 12, "microbatches": 3}),
        Case(4, 2, {"pp": 1, "dp": 2, "tp": 2, "batch": 16, "microbatches": 2}),
        Case(2, 3, {"pp": 1, "dp": 2, "tp": 1, "batch": 14, "microbatches": 3}),
        Case(
            2, 5, {"pp": 1, "dp": 2, "tp": 1, "batch": 12, "microbatches": 4}
        ),  # both divide it, their product not
        Case(3, 6, {"pp": 1, "dp": 3, "tp": 1, "batch": 12, "microbatches": 2}),
        Case(8, 4, {"pp": 2, "dp": 2, "tp": 2, "batch": 24, "microbatches": 3}),
    ),
    play=play,
    expected=expected,
    result="the micro-batches",
    after="07-three-dimensions",
    place=20,
    start="How many samples are in a micro-batch? Then: which replica does this rank belong to, that is, what is its "
    "place along dp?",
    mistakes=(
        Mistake(
            "lets-a-remainder-go",
            (
                "14 samples, 2 replicas, 3 micro-batches: how many samples does your cut leave out?",
                "`//` rounds down, and what is left over is lost without a word. Refuse: `raise ValueError(...)` if "
                "dp × microbatches does not divide the batch.",
            ),
            [("    if rest:\n", "    if False:\n")],
            when=accepted,
        ),
        Mistake(
            "every-replica-has-the-whole-batch",
            (
                "How often is each sample used?",
                "Each replica goes through all samples. The gradient is right, even so, and dp ranks do the same "
                "work: the batch is cut among replicas first, and only then into micro-batches.",
            ),
            [
                ("divmod(batch, dp * microbatches)", "divmod(batch, microbatches)"),
                ("replica = rank // tp % dp", "replica = 0"),
            ],
        ),
        Mistake(
            "the-first-replica-s-samples-everywhere",
            (
                "How often is the first sample used, and how often the last?",
                "Each replica takes its own part: the one at place d along dp begins d × microbatches × size samples "
                "further on.",
            ),
            [("replica = rank // tp % dp", "replica = 0")],
        ),
        Mistake(
            "dealt-by-rank",
            (
                "With tp = 1 and pp = 1 it is right. Which ranks have to have the same samples?",
                "Ranks along tp and pp hold parts of one replica: they work on the same samples. What counts is the "
                "place along dp, not the rank.",
                "`rank // tp % dp`: tp varies fastest, then dp.",
            ),
            [("replica = rank // tp % dp", "replica = rank % dp")],
        ),
        Mistake(
            "forgets-pp",
            (
                "It fails only where there are several stages. What is `rank // tp` of the last rank?",
                "`rank // tp` counts on through the stages. The place along dp is what is left of it after dividing "
                "by dp: `rank // tp % dp`.",
            ),
            [("rank // tp % dp", "rank // tp")],
            when=lambda seen: seen.case["pp"] > 1 and "there is no sample" in seen.error,
        ),
        Mistake(
            "one-micro-batch-of-everything",
            (
                "How many micro-batches do you return, and how many were asked for?",
                "A replica's share goes through the pipeline in `microbatches` pieces. As one piece, there is "
                "nothing to fill the bubble with.",
            ),
            [("[list(samples[i * size : (i + 1) * size]) for i in range(microbatches)]", "[list(samples)]")],
        ),
    ),
    otherwise=(
        "Write down the samples of each rank for 12 samples, 2 replicas and 3 micro-batches: 6 lists of 2.",
    ),
)

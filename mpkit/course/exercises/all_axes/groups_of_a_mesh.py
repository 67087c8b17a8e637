"""Groups of a mesh.

The ranks are a box of pp × dp × tp. Neighbouring ranks differ in tp first, since shards of a layer talk most, and in
pp last. With 2 × 2 × 2 ranks:

    rank      0  1  2  3  4  5  6  7
    pp        0  0  0  0  1  1  1  1
    dp        0  0  1  1  0  0  1  1
    tp        0  1  0  1  0  1  0  1

A rank's group *along* an axis has the ranks that differ from it in that axis only: rank 0's along dp is [0, 2]. Give
every rank its three groups. `ctx.comm.group(ranks)` makes one, and all ranks of the run make all groups together, in
the same order, also those that they are not in.

Your groups are used: each rank all-reduces a number along each axis.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 3.2, for the order of the axes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.plan.mesh import Mesh


# %% answer
def groups_of_a_mesh(ctx: mk.Context, pp: int, dp: int, tp: int) -> dict[str, object]:
    """Return this rank's group along each axis: {"pp": ..., "dp": ..., "tp": ...}, as `ctx.comm.group` makes them."""
    ### BEGIN SOLUTION
    box = torch.arange(pp * dp * tp).view(pp, dp, tp)
    along = {
        "pp": box.permute(1, 2, 0).reshape(-1, pp),
        "dp": box.permute(0, 2, 1).reshape(-1, dp),
        "tp": box.reshape(-1, tp),
    }
    mine: dict[str, object] = {}
    for axis, rows in along.items():
        for ranks in rows.tolist():
            group = ctx.comm.group(ranks)
            if ctx.rank in ranks:
                mine[axis] = group
    return mine
    ### END SOLUTION


# %% checks
SHAPES = ((1, 2, 1), (1, 2, 2), (3, 1, 2), (2, 2, 2))  # pp, dp, tp
VARIES = {
    "SHAPES": (
        ((1, 2, 1), (1, 2, 2), (3, 1, 2), (2, 2, 2)),
        ((1, 2, 1), (1, 2, 3), (2, 1, 2), (2, 2, 2)),
        ((1, 3, 1), (1, 2, 2), (2, 1, 3), (2, 2, 2)),
        ((1, 2, 1), (1, 3, 2), (3, 1, 2), (2, 2, 2)),
        ((1, 3, 1), (1, 3, 2), (2, 1, 3), (2, 2, 2)),
    )
}


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return whether all ranks make the same groups, and who is in them: sums of powers of two show it."""
    assert callable(answer)
    made: list[str] = []
    make = ctx.comm.group

    def noted(ranks: Sequence[int]) -> Any:
        made.append(str(list(ranks)))
        return make(ranks)

    setattr(ctx.comm, "group", noted)  # noqa: B010
    groups = answer(ctx, case["pp"], case["dp"], case["tp"])
    mark = torch.tensor([zlib.crc32(" ".join(made).encode())])
    alike = bool((ctx.comm.all_gather(mark) == mark).all())
    answers: dict[str, Any] = {"all ranks make the same groups": alike, "pp": None, "dp": None, "tp": None}
    for axis in ("pp", "dp", "tp") if alike else ():
        total = ctx.comm.all_reduce(torch.tensor([2**ctx.rank]), groups[axis])
        answers[axis] = [rank for rank in range(case.ranks) if int(total) >> rank & 1]
    return answers


def expected(case: Case) -> list[object]:
    """Return the ranks of each rank's group along each axis."""
    mesh = Mesh(pp=case["pp"], dp=case["dp"], tp=case["tp"])
    return [
        {
            "all ranks make the same groups": True,
            **{axis: list(mesh.group(rank, axis)) for axis in ("pp", "dp", "tp")},
        }
        for rank in range(case.ranks)
    ]


def cases() -> list[Case]:
    """Return a case for each mesh, the simple ones first."""
    return [
        Case(pp * dp * tp, seed, {"pp": pp, "dp": dp, "tp": tp}) for seed, (pp, dp, tp) in enumerate(SHAPES)
    ]


EXERCISE = OnRanks(
    solution=groups_of_a_mesh,
    cases=cases(),
    play=play,
    expected=expected,
    result="the groups, and who is in them",
    budgets=(Budget("collectives that a rank takes part in, one of them the check's own", collectives, 4),),
    after="07-three-dimensions",
    place=10,
    start="`torch.arange(pp * dp * tp).view(pp, dp, tp)` is the box. Along tp its groups are the rows. Which numbers "
    "does one have to go through for those along dp?",
    mistakes=(
        Mistake(
            "tp-outermost",
            (
                "Which ranks are neighbours in your tp groups, and which in the table above?",
                "tp varies fastest: ranks 0 and 1 are one tp group. Yours has it the other way round, so the axis "
                "that talks most would go over the slow links between nodes.",
                "`.view(pp, dp, tp)`: the last axis is the one that neighbours differ in.",
            ),
            [
                (
                    "box = torch.arange(pp * dp * tp).view(pp, dp, tp)",
                    "box = torch.arange(pp * dp * tp).view(tp, dp, pp).permute(2, 1, 0)",
                )
            ],
        ),
        Mistake(
            "same-coordinate-instead-of-along",
            (
                "Your group along dp: do its ranks have different places along dp, or the same?",
                "A group along an axis has one rank of each place along it; in all other axes its ranks are alike. "
                "Yours has all ranks that share a place along it.",
            ),
            [
                ("box.permute(1, 2, 0).reshape(-1, pp)", "box.reshape(pp, -1)"),
                ("box.permute(0, 2, 1).reshape(-1, dp)", "box.permute(1, 0, 2).reshape(dp, -1)"),
                ('"tp": box.reshape(-1, tp)', '"tp": box.permute(2, 0, 1).reshape(tp, -1)'),
            ],
        ),
        Mistake(
            "dp-groups-are-neighbours",
            (
                "Which ranks are in your group along dp? Do they differ in dp only?",
                "Reshaping to rows of dp takes neighbours, and neighbours differ in tp. The axis has to come last "
                "before you cut rows: permute first.",
                "`box.permute(0, 2, 1).reshape(-1, dp)`",
            ),
            [("box.permute(0, 2, 1).reshape(-1, dp)", "box.reshape(-1, dp)")],
        ),
        Mistake(
            "only-its-own-groups",
            (
                "How often does rank 0 call `ctx.comm.group` in your program, and with which ranks? And rank 1?",
                "A group is made by all ranks of the run together. If each makes its own only, ranks meet in the "
                "making of different groups.",
                "Loop over *all* groups of an axis, make each, and keep the one that this rank is in.",
            ),
            [
                ("            group = ctx.comm.group(ranks)\n", ""),
                ("mine[axis] = group", "mine[axis] = ctx.comm.group(ranks)"),
            ],
            when=lambda seen: (
                seen.hang or seen.mismatch or (seen.got and not seen.got[0]["all ranks make the same groups"])
            ),
        ),
    ),
    otherwise=(
        "Print `ctx.rank` and the ranks of each of its groups for 2 × 2 × 2, and look at rank 5: pp 1, dp 0, tp 1.",
    ),
)

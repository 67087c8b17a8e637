"""Groups of a mesh."""

import zlib
from collections.abc import Sequence

from mpkit.course.author import *
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
SHAPES = ((1, 2, 1), (1, 2, 2), (3, 1, 2), (2, 2, 2))  # pp, dp, tp; the simple ones first


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return whether all ranks make the same groups, and who is in them: sums of powers of two show it."""
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
        total = groups[axis].all_reduce(torch.tensor([2**ctx.rank]))
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


EXERCISE = OnRanks(
    cases=[Case(pp * dp * tp, i, {"pp": pp, "dp": dp, "tp": tp}) for i, (pp, dp, tp) in enumerate(SHAPES)],
    budgets=(Budget("collectives that a rank takes part in, one of them the check's own", collectives, 4),),
)

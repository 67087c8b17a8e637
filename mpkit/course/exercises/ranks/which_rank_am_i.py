"""Which rank am I."""

from __future__ import annotations

import mpkit as mk
from mpkit.course.framework.exercise import Case
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.plan.mesh import Mesh as Target


# %% answer
class Mesh:
    """A box of pp x dp x tp ranks."""

    def __init__(self, pp: int, dp: int, tp: int) -> None:
        self.pp, self.dp, self.tp = pp, dp, tp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return the coordinates (pp, dp, tp) of a rank."""
        ### BEGIN SOLUTION
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp
        ### END SOLUTION

    def rank(self, pp: int, dp: int, tp: int) -> int:
        """Return the rank at these coordinates."""
        ### BEGIN SOLUTION
        return (pp * self.dp + dp) * self.tp + tp
        ### END SOLUTION

    def group(self, rank: int, axis: str) -> list[int]:
        """Return this rank and those that differ from it along this axis only ("pp", "dp" or "tp"), ascending."""
        ### BEGIN SOLUTION
        pp, dp, tp = self.place(rank)
        if axis == "pp":
            return [self.rank(i, dp, tp) for i in range(self.pp)]
        if axis == "dp":
            return [self.rank(pp, i, tp) for i in range(self.dp)]
        return [self.rank(pp, dp, i) for i in range(self.tp)]
        ### END SOLUTION


# %% checks
AXES = ("pp", "dp", "tp")


def play(ctx: mk.Context, answer: type[Mesh], case: Case) -> dict[str, object]:
    """Return this rank's place, its rank computed from that place, and its groups, by the answer's mesh."""
    mesh = answer(*(case[axis] for axis in AXES))
    place = mesh.place(ctx.rank)
    result = {"place": place, "rank": mesh.rank(*place)}
    return {**result, **{f"group along {axis}": mesh.group(ctx.rank, axis) for axis in AXES}}


def expected(case: Case) -> list[dict[str, object]]:
    """Return the same according to the kit's own mesh."""
    mesh = Target(**case.sizes)
    return [
        {"place": (mesh.place(rank).pp, mesh.place(rank).dp, mesh.place(rank).tp), "rank": rank}
        | {f"group along {axis}": list(mesh.group(rank, axis)) for axis in AXES}
        for rank in range(case.ranks)
    ]


def _case(pp: int, dp: int, tp: int) -> Case:
    return Case(pp * dp * tp, sizes={"pp": pp, "dp": dp, "tp": tp})


EXERCISE = OnRanks(
    solution=Mesh,
    cases=(_case(1, 1, 2), _case(2, 1, 2), _case(2, 2, 2), _case(1, 3, 2)),
    play=play,
    expected=expected,
    result="its place and its groups",
    after="07-three-dimensions",
    place=60,
)

"""Which rank am I.

A mesh lays ranks out as a box of pp x dp x tp: pipeline stages, replicas, shards of a layer. A rank is then a number,
and three coordinates. Ranks are counted like the digits of a number: **tp is the last digit and runs fastest**, so that
ranks that share layers are neighbours and have the fast links between them; pp is the first and runs slowest.

```text
    Mesh(pp=2, dp=2, tp=2)

                tp 0  tp 1                tp 0  tp 1
         dp 0     0     1          dp 0     4     5
         dp 1     2     3          dp 1     6     7
               pp 0                      pp 1
```

Write the three methods of `Mesh`. The ranks of rank r's group along an axis are those that differ from r in this
coordinate only: rank 5's group along dp is `[5, 7]`, and along pp `[1, 5]`. The degrees are seldom all 2.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
"""

from __future__ import annotations

import mpkit as mk
from mpkit.course.framework.exercise import Case, Mistake
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
    start="Count like a clock: tp is the seconds, dp the minutes, pp the hours. How do you get the seconds out of a "
    "number of seconds, and how the hours?",
    mistakes=(
        Mistake(
            "tp-outermost",
            (
                "Look at the ranks of a tensor-parallel group: are they neighbours?",
                "You count with tp as the first digit, so that the next rank differs in pp. The last axis runs "
                "fastest, and the last one is tp.",
                "`tp = rank % self.tp`; what is left, `rank // self.tp`, is cut by `self.dp` in the same way.",
            ),
            [
                (
                    "return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp",
                    "return rank % self.pp, rank // self.pp % self.dp, rank // (self.pp * self.dp)",
                ),
                ("return (pp * self.dp + dp) * self.tp + tp", "return (tp * self.dp + dp) * self.pp + pp"),
            ],
        ),
        Mistake(
            "dp-slower-than-pp",
            (
                "tp is right. Which of dp and pp changes next, when you count on?",
                "You let pp run faster than dp. The order of the axes is pp, dp, tp, and the later ones run faster.",
                "A step along pp is `self.dp * self.tp` ranks wide, a step along dp `self.tp`.",
            ),
            [
                (
                    "return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp",
                    "return rank // self.tp % self.pp, rank // (self.pp * self.tp), rank % self.tp",
                ),
                ("return (pp * self.dp + dp) * self.tp + tp", "return (dp * self.pp + pp) * self.tp + tp"),
            ],
        ),
        Mistake(
            "groups-are-blocks",
            (
                "The places are right. Draw the box of pp=2, dp=1, tp=2: which ranks are in one pipeline?",
                "Only a group along tp is a block of neighbours. Along dp and pp its ranks are some way apart.",
                "Keep two coordinates, let the third run, and turn each place into its rank with `self.rank`.",
            ),
            [
                (
                    "pp, dp, tp = self.place(rank)\n        if",
                    "size = {'pp': self.pp, 'dp': self.dp, 'tp': self.tp}[axis]\n"
                    "        first = rank // size * size\n"
                    "        return list(range(first, first + size))\n        if",
                )
            ],
        ),
        Mistake(
            "coordinates-not-ranks",
            (
                "What are the members of a group: coordinates along the axis, or ranks?",
                "You list 0, 1, ... up to the degree. These are coordinates; a collective's group is made of global "
                "ranks.",
                "`self.rank(i, dp, tp)` is the rank at coordinate i along pp.",
            ),
            [
                ("[self.rank(i, dp, tp) for i in", "[i for i in"),
                ("[self.rank(pp, i, tp) for i in", "[i for i in"),
                ("[self.rank(pp, dp, i) for i in", "[i for i in"),
            ],
        ),
        Mistake(
            "without-itself",
            (
                "How many ranks has a group along an axis of degree 2?",
                "A rank belongs to its own group: it takes part in the group's collectives as well.",
            ),
            [
                ("for i in range(self.pp)]", "for i in range(self.pp) if i != pp]"),
                ("for i in range(self.dp)]", "for i in range(self.dp) if i != dp]"),
                ("for i in range(self.tp)]", "for i in range(self.tp) if i != tp]"),
            ],
        ),
        Mistake(
            "divides-by-the-own-degree",
            (
                "Your places are right where all degrees are equal. What is the width of a step along pp?",
                "A step along pp passes over a whole dp x tp layer of the box: its width is made of the degrees of "
                "the axes that run faster, not of its own.",
            ),
            [
                (
                    "return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp",
                    "return rank // (self.pp * self.dp), rank // self.dp % self.dp, rank % self.tp",
                ),
            ],
        ),
    ),
    otherwise=(
        "Draw the box of the case that fails, write the ranks into it, and compare with what `Mesh(...).place(rank)` "
        "says for each rank: you can call it in a cell, it needs no ranks.",
    ),
)

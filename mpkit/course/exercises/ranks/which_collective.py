"""Which collective is it.

A collective is something that all ranks of a group do together. It is known by what it does to the ranks' tensors. Here
four ranks do one collective in each of ten questions; the table shows every rank's tensor before it and after it. A dot
is an empty tensor.

```text
                 rank 0        rank 1        rank 2        rank 3

    a  before    1 2 3 4       5 6 7 8       9 10 11 12    13 14 15 16
       after     9 10 11 12    9 10 11 12    9 10 11 12    9 10 11 12

    b  before    1 2 3 4       5 6 7 8       9 10 11 12    13 14 15 16
       after     5             6             7             8

    c  before    1 2           3 4           5 6           7 8
       after     16 20         16 20         16 20         16 20

    d  before    1 2           3 4           5 6           7 8
       after     1 2           3 4           5 6           16 20

    e  before    1             2             3             4
       after     1 2 3 4       1 2 3 4       1 2 3 4       1 2 3 4

    f  before    1             2             3             4
       after     .             1 2 3 4       .             .

    g  before    1 2 3 4       5 6 7 8       9 10 11 12    13 14 15 16
       after     28            32            36            40

    h  before    1 2 3 4       5 6 7 8       9 10 11 12    13 14 15 16
       after     1 5 9 13      2 6 10 14     3 7 11 15     4 8 12 16

    i  before    4 0 0 0       0 3 0 0       0 0 2 0       0 0 0 1
       after     4             3             2             1

    j  before    0 0 7 0       0 0 7 0       0 0 7 0       0 0 7 0
       after     0             0             7             0
```

For each write its name: "broadcast", "scatter", "gather", "reduce", "all_gather", "all_reduce", "reduce_scatter" or
"all_to_all". Where there is a sum, it is over ranks. The last two need a second look. You may try everything in a cell:

```python
def try_it(ctx):
    return ctx.comm.all_gather(torch.tensor([ctx.rank + 1.0]))

mk.Cluster(ranks=4).run(try_it)
```

Source of the names: the MPI standard, chapter 6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import mpkit as mk
from mpkit.course.framework.exercise import Mistake
from mpkit.course.framework.questions import Questions
from mpkit.course.framework.room import Room

if TYPE_CHECKING:
    from torch import Tensor

# %% answer
answers = {
    ### BEGIN SOLUTION
    # instead: "a": ...,
    # instead: "b": ...,
    # instead: "c": ...,
    # instead: "d": ...,
    # instead: "e": ...,
    # instead: "f": ...,
    # instead: "g": ...,
    # instead: "h": ...,
    # instead: "i": ...,
    # instead: "j": ...,
    "a": "broadcast",
    "b": "scatter",
    "c": "all_reduce",
    "d": "reduce",
    "e": "all_gather",
    "f": "gather",
    "g": "reduce_scatter",
    "h": "all_to_all",
    "i": "reduce_scatter",
    "j": "scatter",
    ### END SOLUTION
}

# %% checks
RANKS = 4
ROOTED = ("broadcast", "scatter", "gather", "reduce")
ALIKE = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")

Table = tuple[list[list[float]], list[list[float]]]
"""Every rank's numbers, before and after."""


def tables(text: str) -> dict[str, Table]:
    """Return the questions, as the text above shows them."""
    drawn = re.findall(r"^    (\w)  before +(.*)\n +after +(.*)$", text, re.M)
    return {name: (_numbers(before), _numbers(after)) for name, before, after in drawn}


def _numbers(row: str) -> list[list[float]]:
    return [[float(each) for each in cell.split() if each != "."] for cell in re.split(r" {2,}", row.strip())]


def every_collective(ctx: mk.Context, befores: list[list[list[float]]]) -> list[dict[str, list[float]]]:
    """Return, for each question, what this rank has after each collective; for those with a root, for every root."""
    import torch

    return [_after(ctx, torch.tensor(before[ctx.rank])) for before in befores]


def _after(ctx: mk.Context, mine: Tensor) -> dict[str, list[float]]:
    results = {}
    for name in ALIKE if len(mine) % RANKS == 0 else ALIKE[:2]:
        results[name] = getattr(ctx.comm, name)(mine.clone())
    for name in ROOTED if len(mine) % RANKS == 0 else ("broadcast", "gather", "reduce"):
        for root in range(RANKS):
            results[f"{name} {root}"] = getattr(ctx.comm, name)(mine.clone(), root)
    return {name: tensor.tolist() for name, tensor in results.items()}


def truth(room: Room) -> Mapping[str, str]:
    """Run every collective on ranks, and return for each question the one whose outcome is in the table.

    Where there are no ranks, the solution is right: a test compares it with what ranks do.
    """
    if not room.has_ranks:
        return answers
    asked = tables(__doc__ or "")
    done = room.cluster(RANKS).run(every_collective, [before for before, _ in asked.values()])
    right = {}
    for i, (question, (_, after)) in enumerate(asked.items()):
        fits = [name for name in done[0][i] if [done[rank][i][name] for rank in range(RANKS)] == after]
        names = {name.split()[0] for name in fits}
        assert len(names) == 1, f"question {question}: {fits} would fit"
        right[question] = names.pop()
    return right


def _all(**wrong: str) -> str:
    return f"answers = { ({**answers, **wrong})!r}"


EXERCISE = Questions(
    solution=answers,
    called="answers",
    truth=truth,
    after="02-data-parallel",
    place=50,
    start="Ask of each table: who has something new afterwards, one rank or all? Are there sums in it, or only moved "
    "numbers? Is a rank's tensor longer or shorter than before?",
    mistakes=(
        Mistake(
            "gather-or-all-gather",
            (
                "In one of the two every rank has the whole afterwards, in the other a single one. Which name has "
                "the all?",
                "You take gather and all_gather for each other. gather has a root, and only the root gets the parts; "
                "all_gather has none. The same for reduce and all_reduce.",
            ),
            _all(e="gather", f="all_gather"),
        ),
        Mistake(
            "reduce-or-all-reduce",
            (
                "How many ranks have the sum afterwards?",
                "You take reduce and all_reduce for each other. After a reduce only the root has the sum, and the "
                "others keep what they had; after an all_reduce all have it.",
            ),
            _all(c="reduce", d="all_reduce"),
        ),
        Mistake(
            "sum-in-pieces",
            (
                "In g every rank has one number, and it is a sum. Who has the other sums?",
                "It is the sum of an all_reduce, of which each rank keeps one part. That saves half of the way: "
                "all_reduce is this one, and then an all_gather.",
                "What reduces and then scatters is called reduce_scatter.",
            ),
            _all(g="all_reduce"),
        ),
        Mistake(
            "scatter-or-broadcast",
            (
                "Does everybody get the same, or everybody another part?",
                "Both go from a root to all. A broadcast gives the whole to each, a scatter cuts it into parts.",
            ),
            _all(a="scatter", b="broadcast"),
        ),
        Mistake(
            "a-transposition",
            (
                "In h nothing is added, and no tensor is longer than before. Write the ranks below each other: what "
                "happened to rows and columns?",
                "Each rank sends another part to each other: part j of rank i becomes part i of rank j. With "
                "all_gather every rank would have the same afterwards.",
                "It is a transposition, and called all_to_all. Mixture-of-experts layers send tokens so.",
            ),
            _all(h="all_gather"),
        ),
        Mistake(
            "zeros-hide-a-sum",
            (
                "In i rank 1 has 3 afterwards. If a root had scattered its tensor, whose was it?",
                "No rank had 4 3 2 1 to scatter. But the sum over ranks is 4 3 2 1: each rank keeps its own part of "
                "it.",
            ),
            _all(i="scatter"),
        ),
        Mistake(
            "a-sum-that-is-none",
            (
                "In j, what would the sum of the four ranks' tensors be?",
                "A sum would be 28, and 7 is no sum here: somebody's tensor was cut, and each got a part. Since all "
                "had the same tensor, nobody can say who the root was.",
            ),
            _all(j="reduce_scatter"),
        ),
    ),
    otherwise=(
        "Ask of each table: who has something new afterwards, one rank or all? Are there sums in it, or only moved "
        "numbers? Is a rank's tensor longer or shorter than before?",
        "From one to all: broadcast, scatter. From all to one: gather, reduce. From all to all: all_gather, "
        "all_reduce, reduce_scatter, all_to_all.",
        "Two names have a sum in the beginning (reduce, all_reduce), and one has both a sum and a cut "
        "(reduce_scatter). Try the one you think of in a cell, with the numbers of the table.",
    ),
)

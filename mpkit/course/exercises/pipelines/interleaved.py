"""Interleaved 1F1B."""

from mpkit.course.author import *
from mpkit.course.exercises.pipelines import one_by_one


# %% answer
def interleaved(p: int, m: int, v: int) -> list[str]:
    """Return the interleaved 1F1B: a row of text for each of p ranks with v stages each, for m micro-batches."""
    ### BEGIN SOLUTION
    rows = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        turns = [range(first, first + p) for first in range(0, m, p)]
        forwards = [f"{stage}F{i}" for turn in turns for stage in stages for i in turn]
        backwards = [f"{stage}B{i}" for turn in turns for stage in reversed(stages) for i in turn]
        rows.append(one_by_one(forwards, backwards, (v - 1) * p + 2 * (p - 1 - rank)))
    return rows
    ### END SOLUTION


# %% checks
def held(case: Case) -> float:
    """Return how many activations of a stage a rank may hold: vp micro-batches, and p-1 for the longer warm-up."""
    return float(case["virtual_stages"] * case.ranks + case.ranks - 1)


EXERCISE = Schedules(
    cases=(
        Case(2, 1, {"microbatches": 4, "virtual_stages": 2}),
        Case(3, 2, {"microbatches": 6, "virtual_stages": 2}),
        Case(2, 3, {"microbatches": 6, "virtual_stages": 3}),
    ),
    also=("virtual_stages",),
    shape=in_turns,
    budgets=(
        Budget(
            "bubble",
            bubble,
            lambda case: (case.ranks - 1) / (case["virtual_stages"] * case["microbatches"] + case.ranks - 1),
        ),
        Budget("live activations of stages", live, held),
    ),
)

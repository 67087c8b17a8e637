"""Interleaved 1F1B."""

from __future__ import annotations

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


def blocks(seen: Seen) -> bool:
    """Return whether each rank holds consecutive stages: the first rank the first v, and so on."""
    holders = seen.schedule.stage_to_rank if seen.schedule is not None else ()
    return len(holders) > len(set(holders)) and list(holders) == sorted(holders)


EXERCISE = Schedules(
    solution=interleaved,
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
    after="04-schedules",
    place=60,
    when={
        "neighbouring-stages-on-a-rank": blocks,
        "warm-up-of-1f1b": lambda seen: "a backward needs what its forward kept" in seen.error,
        "backwards-through-the-stages-in-forward-order": lambda seen: (
            "wait for each other" in seen.error or "the gradient comes from" in seen.error
        ),
        "names-no-stage": lambda seen: "stages, and asked for were" in seen.error,
    },
)

"""Interleaving with any number of micro-batches."""

from __future__ import annotations

import re

from mpkit.course.exercises.pipelines import one_by_one
from mpkit.course.framework.exercise import Budget, Case
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.schedules import Schedules, bubble, in_turns, live


# %% answer
def ragged(p: int, m: int, v: int) -> list[str]:
    """Return interleaved 1F1B: a row of text for each of p ranks, v stages per rank, m >= p micro-batches."""
    ### BEGIN SOLUTION
    count = m // p
    turns, first = [], 0
    for number in range(count):
        length = m // count + (number < m % count)
        turns.append(range(first, first + length))
        first += length
    rows = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        forwards = [f"{stage}F{i}" for turn in turns for stage in stages for i in turn]
        backwards = [f"{stage}B{i}" for turn in turns for stage in reversed(stages) for i in turn]
        rows.append(one_by_one(forwards, backwards, (v - 1) * len(turns[0]) + 2 * (p - 1 - rank)))
    return rows
    ### END SOLUTION


# %% checks
HELD = "live activations of stages"


def held(case: Case) -> float:
    """Return how many activations of a stage a rank may hold: those of the text."""
    longest = -(-case["microbatches"] // (case["microbatches"] // case.ranks))
    return float((case["virtual_stages"] - 1) * longest + 2 * case.ranks - 1)


def counted(seen: Seen) -> int:
    """Return how many micro-batches a schedule has that was refused for their number; 0 if it was not."""
    number = re.search(r"ranks and (\d+) micro-batches, and asked for were", seen.error)
    return int(number[1]) if number else 0


def first_turn_is_short(seen: Seen) -> bool:
    """Return whether rank 0, as the error draws its row, begins with a turn of p micro-batches."""
    row = seen.error.partition("rank 0 |")[2].partition("\n")[0].split()
    return row.index(f"{seen.case.ranks}F0") == seen.case.ranks


EXERCISE = Schedules(
    solution=ragged,
    cases=(
        Case(2, 1, {"microbatches": 5, "virtual_stages": 2}),
        Case(3, 2, {"microbatches": 11, "virtual_stages": 2}),
        Case(2, 3, {"microbatches": 3, "virtual_stages": 3}),
    ),
    also=("virtual_stages",),
    shape=in_turns,
    budgets=(
        Budget(
            "bubble",
            bubble,
            lambda case: (case.ranks - 1) / (case["virtual_stages"] * case["microbatches"] + case.ranks - 1),
        ),
        Budget(HELD, live, held),
    ),
    after="04-schedules",
    place=65,
    when={
        "names-micro-batches-that-are-not-there": lambda seen: counted(seen) > seen.case["microbatches"],
        "drops-the-rest": lambda seen: 0 < counted(seen) < seen.case["microbatches"],
        "one-turn-for-all": lambda seen: seen.budget == HELD,
        "warm-up-counted-from-p": lambda seen: "comes before" in seen.error and not first_turn_is_short(seen),
        "the-longer-turns-last": lambda seen: "comes before" in seen.error and first_turn_is_short(seen),
    },
)

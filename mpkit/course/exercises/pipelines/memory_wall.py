"""The memory wall."""

from __future__ import annotations

import re

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.schedules import SHAPE, Schedules, bubble


# %% answer
def memory_wall(p: int, m: int, cap: int) -> list[str]:
    """Return GPipe in rounds: a row of text for each of p ranks, for m micro-batches, at most `cap` of them live."""
    ### BEGIN SOLUTION
    row: list[str] = []
    for first in range(0, m, cap):
        group = range(first, min(first + cap, m))
        row += [f"F{i}" for i in group]
        row += [f"B{i}" for i in group]
    return [" ".join(row)] * p
    ### END SOLUTION


# %% checks
def in_rounds(case: Case) -> float:
    """Return the bubble of the smallest possible number of rounds."""
    rounds = -(-case["microbatches"] // case["cap"])
    idle = rounds * (case.ranks - 1)
    return float(idle / (case["microbatches"] + idle))


def scheduled(seen: Seen) -> int:
    """Return how many micro-batches the schedule has if it is for another number; 0 if that is not what is wrong."""
    match = re.search(r"and (\d+) micro-batch(?:es)?, and asked for were", seen.error)
    return int(match[1]) if match else 0


def not_in_rounds(schedule: mk.Schedule, case: Case) -> str:
    """Return which rank begins a forward before the backwards of its round are done; "" if none does."""
    for rank, row in enumerate(schedule.rows):
        live, backward = 0, False
        for action in row:
            if action.kind == "F":
                if backward and live:
                    return f"rank {rank} does F{action.microbatch} in the middle of a round's backwards"
                live, backward = live + 1, False
            else:
                live, backward = live - (action.kind in ("B", "W")), True
    return ""


EXERCISE = Schedules(
    solution=memory_wall,
    cases=(
        Case(2, 1, {"microbatches": 6, "cap": 3}),
        Case(3, 2, {"microbatches": 8, "cap": 4}),
        Case(4, 3, {"microbatches": 7, "cap": 3}),
    ),
    also=("cap",),
    max_live=lambda case: float(case["cap"]),
    shape=not_in_rounds,
    budgets=(Budget("bubble", bubble, in_rounds),),
    after="04-schedules",
    place=40,
    when={
        "all-forwards-first": lambda seen: "max_live" in seen.error,
        "forwards-between-the-backwards": lambda seen: seen.budget == SHAPE,
        "loses-the-last-round": lambda seen: 0 < scheduled(seen) < seen.case["microbatches"],
        "past-the-last-micro-batch": lambda seen: scheduled(seen) > seen.case["microbatches"],
    },
)

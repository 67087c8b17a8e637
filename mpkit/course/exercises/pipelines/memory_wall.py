"""The memory wall.

GPipe holds the activations of all m micro-batches at once: a rank does every forward before its first backward. Here
a rank may hold at most `cap` of them. Cut the step into rounds, each of them a small GPipe of at most `cap`
micro-batches, the gradients added up over all:

    cap = 2, m = 4      F0 F1 B0 B1 F2 F3 B2 B3

Every round fills the pipeline and drains it again, so the cap has a price. With R rounds the bubble is
R(p-1)/(m + R(p-1)): take as few rounds as the cap allows. A round's backwards are all done before the next round's
first forward. (1F1B, the next exercise, gets round this price, and is no answer to this one.)

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019,
and gradient accumulation, which is what a round is.
"""

from __future__ import annotations

import re

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.schedules import SHAPE, Schedules, bubble
from mpkit.course.framework.seen import Seen


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
    start="Write GPipe's row first: all forwards, then all backwards. How many micro-batches may be in it, with this "
    "cap? And what comes after them?",
    mistakes=(
        Mistake(
            "all-forwards-first",
            (
                "The arrow shows the forward that is too much. What frees memory, and when does this row do it first?",
                "A micro-batch's activations are held from its F to its B. Not more than `cap` F's may stand before a "
                "B: go backward with these before you begin others.",
                "`for first in range(0, m, cap)`: the forwards of `range(first, first + cap)`, then their backwards.",
            ),
            [("range(0, m, cap)", "range(0, m, m)"), ("first + cap", "first + m")],
            when=lambda seen: "max_live" in seen.error,
        ),
        Mistake(
            "forwards-between-the-backwards",
            (
                "Look at the row that is named: how many micro-batches have gone forward and not backward when a new "
                "forward begins?",
                "A forward as soon as one backward has made room is 1F1B, the next exercise. Here rounds are apart: "
                "forwards of a round, all their backwards, then the next round.",
            ),
            """
            def memory_wall(p: int, m: int, cap: int) -> list[str]:
                row = []
                for i in range(m + cap):
                    row += [f"F{i}"] * (i < m) + [f"B{i - cap + 1}"] * (0 <= i - cap + 1 < m)
                return [" ".join(row)] * p
            """,
            when=lambda seen: seen.budget == SHAPE,
        ),
        Mistake(
            "one-at-a-time",
            (
                "It fits. But how many ranks work at the same time?",
                "With one micro-batch a round there is no pipeline: it goes down and up alone. The cap allows more: "
                "use all of it.",
            ),
            [("range(0, m, cap)", "range(m)"), ("first + cap", "first + 1")],
        ),
        Mistake(
            "one-less-than-the-cap",
            (
                "How many micro-batches are live at most in your schedule, and how many may be?",
                "A rank may hold `cap` micro-batches, that many and not one less: smaller rounds are more rounds, "
                "and each has its own bubble.",
            ),
            [("range(0, m, cap)", "range(0, m, cap - 1)"), ("first + cap", "first + cap - 1")],
        ),
        Mistake(
            "loses-the-last-round",
            (
                "The cap need not divide m. What happens to the micro-batches that are left over?",
                "`m // cap` whole rounds leave out `m % cap` micro-batches. A shorter round at the end takes them.",
            ),
            [("range(0, m, cap)", "range(0, m // cap * cap, cap)")],
            when=lambda seen: 0 < scheduled(seen) < seen.case["microbatches"],
        ),
        Mistake(
            "past-the-last-micro-batch",
            (
                "Which micro-batches does the last round have? Which are there?",
                "Where the cap does not divide m, the last round ends early: `min(first + cap, m)`.",
            ),
            [("min(first + cap, m)", "first + cap")],
            when=lambda seen: scheduled(seen) > seen.case["microbatches"],
        ),
    ),
    otherwise=("Look at one rank's row, and count at each F how many micro-batches have no B yet.",),
)

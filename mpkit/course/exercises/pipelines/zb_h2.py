"""No bubble at all: ZB-H2."""

from __future__ import annotations

from mpkit.course.framework.exercise import Budget, Case
from mpkit.course.framework.measures import makespan
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.schedules import Schedules, live
from mpkit.timeline import metrics


# %% answer
def zb_h2(p: int, m: int) -> list[str]:
    """Return ZB-H2: a row of text for each of p ranks, for m micro-batches, m >= 2p - 1."""
    ### BEGIN SOLUTION
    rows = []
    for rank in range(p):
        warm_up = 2 * (p - 1 - rank)
        row = [f"F{i}" for i in range(warm_up)]
        waiting: list[str] = []  # W's whose I is done
        for i in range(m):
            forwards_left = warm_up + i < m
            if forwards_left:
                row.append(f"F{warm_up + i}")
            row.append(f"I{i}")
            waiting.append(f"W{i}")
            if len(waiting) > (2 * rank if forwards_left else rank):
                row.append(waiting.pop(0))
        rows.append(" ".join(row + waiting))
    return rows
    ### END SOLUTION


# %% checks
INSIDE, HELD, LENGTH = (
    "idle time inside of a row",
    "live micro-batches of a rank",
    "time of the step, in forwards",
)


def idle_inside(seen: Seen) -> float:
    """Return the longest idle time of a rank between its first action and its last, in forwards."""
    spans = metrics.work(seen.timeline.spans)
    worst = 0.0
    for rank in range(seen.case.ranks):
        mine = spans[spans["rank"] == rank]
        worst = max(
            worst, float(mine["end"].max() - mine["start"].min() - (mine["end"] - mine["start"]).sum())
        )
    return round(worst, 6)


EXERCISE = Schedules(
    solution=zb_h2,
    cases=(Case(2, 1, {"microbatches": 4}), Case(3, 2, {"microbatches": 6}), Case(4, 3, {"microbatches": 9})),
    budgets=(
        Budget(HELD, live, lambda case: 2.0 * case.ranks - 1),
        Budget(INSIDE, idle_inside, 0),
        Budget(LENGTH, makespan, lambda case: 3.0 * case["microbatches"] + case.ranks - 1),
    ),
    after="04-schedules",
    place=75,
    when={
        "all-w-at-the-end": lambda seen: seen.budget == HELD,
        "forgets-the-rest-of-the-w": lambda seen: "a split backward needs both" in seen.error,
    },
)

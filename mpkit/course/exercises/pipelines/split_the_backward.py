"""Split the backward: ZB-H1."""

from mpkit.course.author import *


# %% answer
def split_the_backward(p: int, m: int) -> list[str]:
    """Return ZB-H1: a row of text for each of p ranks, for m micro-batches, m >= p."""
    ### BEGIN SOLUTION
    rows = []
    for rank in range(p):
        warm_up = p - 1 - rank
        row = [f"F{i}" for i in range(warm_up)]
        waiting: list[str] = []  # W's whose I is done
        for i in range(m):
            forwards_left = warm_up + i < m
            if forwards_left:
                row.append(f"F{warm_up + i}")
            row.append(f"I{i}")
            waiting.append(f"W{i}")
            if len(waiting) > (rank if forwards_left else 0):
                row.append(waiting.pop(0))
        rows.append(" ".join(row + waiting))
    return rows
    ### END SOLUTION


# %% checks
EXERCISE = Schedules(
    cases=(Case(2, 1, {"microbatches": 4}), Case(3, 2, {"microbatches": 4}), Case(4, 3, {"microbatches": 8})),
    budgets=(
        Budget("live micro-batches of a rank", live, lambda case: float(case.ranks)),
        Budget("bubble", bubble, lambda case: (case.ranks - 1) / (3 * case["microbatches"] + case.ranks - 1)),
    ),
)

"""1F1B."""

from mpkit.course.author import *


# %% answer
def one_f_one_b(p: int, m: int) -> list[str]:
    """Return 1F1B: a row of text for each of p ranks, for m micro-batches."""
    ### BEGIN SOLUTION
    rows = []
    for rank in range(p):
        warm_up = min(p - 1 - rank, m)
        row = [f"F{i}" for i in range(warm_up)]
        for i in range(m - warm_up):
            row += [f"F{warm_up + i}", f"B{i}"]
        row += [f"B{i}" for i in range(m - warm_up, m)]
        rows.append(" ".join(row))
    return rows
    ### END SOLUTION


# %% checks
def live_on_the_last_rank(seen: Seen) -> float:
    """Return the last rank's peak of live micro-batches; one is enough, as each backward can follow its forward."""
    assert seen.schedule is not None
    return seen.schedule.peak_live[-1]


EXERCISE = Schedules(
    cases=(
        Case(2, 1, {"microbatches": 4}),
        Case(3, 2, {"microbatches": 6}),
        Case(4, 3, {"microbatches": 8}),
        Case(4, 4, {"microbatches": 2}),
    ),
    budgets=(
        Budget("bubble", bubble, lambda case: (case.ranks - 1) / (case["microbatches"] + case.ranks - 1)),
        Budget(
            "live micro-batches of a rank", live, lambda case: float(min(case.ranks, case["microbatches"]))
        ),
        Budget("live micro-batches of the last rank", live_on_the_last_rank, 1),
    ),
)

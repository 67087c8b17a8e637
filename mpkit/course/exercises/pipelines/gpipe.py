"""GPipe."""

from mpkit.course.author import *


# %% answer
def gpipe(p: int, m: int) -> list[str]:
    """Return GPipe's schedule: a row of text for each of p ranks, for m micro-batches."""
    ### BEGIN SOLUTION
    forwards = [f"F{i}" for i in range(m)]
    backwards = [f"B{i}" for i in range(m)]
    return [" ".join(forwards + backwards)] * p
    ### END SOLUTION


# %% checks
def shape(schedule: mk.Schedule, case: Case) -> str:
    """Return which rank goes forward after a backward; "" if none does."""
    for rank, row in enumerate(schedule.rows):
        backward = False
        for action in row:
            if action.kind == "F" and backward:
                return f"rank {rank} does F{action.microbatch} after its first backward"
            backward = backward or action.kind != "F"
    return ""


def in_one_round(case: Case) -> float:
    """Return the bubble of a pipeline that fills and drains once."""
    return (case.ranks - 1) / (case["microbatches"] + case.ranks - 1)


EXERCISE = Schedules(
    cases=(Case(2, 1, {"microbatches": 2}), Case(3, 2, {"microbatches": 4}), Case(4, 3, {"microbatches": 8})),
    budgets=(Budget("bubble", bubble, in_one_round),),
)

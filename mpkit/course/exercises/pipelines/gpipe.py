"""GPipe.

Write GPipe's schedule: with p stages, one per rank, and m micro-batches, every rank does all forwards, then all
backwards. A row of the schedule is what a rank does, in order: `"F0 F1 B0 B1"` are the forwards of micro-batches 0 and
1, then their backwards.

The bubble has to be (p-1)/(m+p-1), the share of the step that a rank is idle. Your schedule is simulated, and then
trains a model on real processes. The backwards may run in any order that is the same on all ranks: it does not change
the bubble. `mk.Plan.gpipe` begins with the last micro-batch, as in figure 2c of the paper.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.
"""

from __future__ import annotations

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.schedules import ONE_ROW, SHAPE, Schedules, bubble


# %% answer
def gpipe(p: int, m: int) -> list[str]:
    """Return GPipe's schedule: a row of text for each of p ranks, for m micro-batches."""
    ### BEGIN SOLUTION
    forwards = [f"F{i}" for i in range(m)]
    backwards = [f"B{i}" for i in range(m)]
    return [" ".join(forwards + backwards)] * p
    ### END SOLUTION


# %% checks
def mixed(schedule: mk.Schedule, case: Case) -> str:
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
    solution=gpipe,
    cases=(Case(2, 1, {"microbatches": 2}), Case(3, 2, {"microbatches": 4}), Case(4, 3, {"microbatches": 8})),
    shape=mixed,
    budgets=(Budget("bubble", bubble, in_one_round),),
    after="01-pipeline-bubbles",
    place=30,
    start='A row is text: `"F0 B0"` does one forward and its backward. Write the row of one rank first, for m '
    "micro-batches; how do the rows of the others differ?",
    mistakes=(
        Mistake(
            "one-row-for-all",
            (
                "What does your function return: one text, or a list of texts?",
                "One text is the row of one rank. All p ranks need a row: return a list of p of them, "
                "`[row] * p` where they are equal.",
            ),
            [('return [" ".join(forwards + backwards)] * p', 'return " ".join(forwards + backwards)')],
            when=lambda seen: ONE_ROW in seen.error,
        ),
        Mistake(
            "1f1b",
            (
                "The bubble is right. In which order does the rank that is named do its forwards and backwards?",
                "A rank that goes backward before its last forward does 1F1B: it holds fewer micro-batches, has the "
                "same bubble, and is an exercise of its own. GPipe does all forwards first.",
            ),
            """
            def gpipe(p: int, m: int) -> list[str]:
                rows = []
                for rank in range(p):
                    first = min(p - 1 - rank, m)
                    row = [f"F{i}" for i in range(first)]
                    for i in range(m - first):
                        row += [f"F{first + i}", f"B{i}"]
                    rows.append(" ".join(row + [f"B{i}" for i in range(m - first, m)]))
                return rows
            """,
            when=lambda seen: seen.budget == SHAPE and bubble(seen) <= in_one_round(seen.case) + 1e-9,
        ),
        Mistake(
            "one-at-a-time",
            (
                "Look at the timeline: how many ranks work at the same time?",
                "A rank that does a backward right after its forward waits until the micro-batch has gone all the way "
                "down and up again. All forwards first.",
            ),
            [('" ".join(forwards + backwards)', '" ".join(f"F{i} B{i}" for i in range(m))')],
            when=lambda seen: seen.budget == SHAPE,
        ),
        Mistake(
            "forgets-the-last-micro-batch",
            (
                "Count the forwards in a row.",
                "There are m micro-batches, 0 to m-1: `range(m)`.",
            ),
            [("range(m)", "range(m - 1)")],
            when=lambda seen: "the schedule is for" in seen.error and "asked for were" in seen.error,
        ),
        Mistake(
            "backwards-on-rank-0-first",
            (
                "The arrow shows the first step that cannot be done. What does it wait for?",
                "The gradient comes from the last stage: its backward of a micro-batch is the first. If ranks take "
                "backwards in different orders, each waits for the other.",
            ),
            """
            def gpipe(p: int, m: int) -> list[str]:
                rows = []
                for rank in range(p):
                    order = range(m) if rank % 2 else reversed(range(m))
                    rows.append(" ".join([f"B{i}" for i in order] + [f"F{i}" for i in range(m)]))
                return rows
            """,
            when=lambda seen: seen.error,
        ),
    ),
    otherwise=("Draw it: `print(mk.Schedule(gpipe, p=3, m=4))` shows the rows on a grid.",),
)

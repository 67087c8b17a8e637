"""Split the backward: ZB-H1.

A backward makes two gradients. The stage before waits for that of the *input*; nobody waits for those of the
*weights* until the optimizer steps. So do them apart: `"I0"` is the first half of micro-batch 0's backward, `"W0"` the
second. Send I's early, and put W's where a rank would be idle.

    p = 3, m = 4     rank 0 | F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
                     rank 1 |  . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
                     rank 2 |  .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Write ZB-H1: 1F1B's warm-up, then F and I in turn, and a W once more than r of them are waiting on rank r (once any is,
when no forward is left). A micro-batch's activations are held until its W is done: put off all W's, and memory grows.

Budgets: a third of 1F1B's idle time, which is a bubble of (p-1)/(3m+p-1), and 1F1B's memory, p micro-batches.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 and figure 3, top.
"""

from __future__ import annotations

from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.schedules import Schedules, bubble, live


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
    solution=split_the_backward,
    cases=(Case(2, 1, {"microbatches": 4}), Case(3, 2, {"microbatches": 4}), Case(4, 3, {"microbatches": 8})),
    budgets=(
        Budget("live micro-batches of a rank", live, lambda case: float(case.ranks)),
        Budget("bubble", bubble, lambda case: (case.ranks - 1) / (3 * case["microbatches"] + case.ranks - 1)),
    ),
    after="04-schedules",
    place=70,
    start="Take your 1F1B, and write I for B. Now the W's are missing: which of them can a rank do, and when would it "
    "be idle otherwise?",
    mistakes=(
        Mistake(
            "b-is-not-split",
            (
                "Where does the stage before wait longest, and for which half of the backward?",
                "A whole B makes both gradients before it sends anything. Split: I first, and W later, when nobody "
                "waits.",
            ),
            """
            def split_the_backward(p: int, m: int) -> list[str]:
                rows = []
                for rank in range(p):
                    warm_up = p - 1 - rank
                    row = [f"F{i}" for i in range(warm_up)]
                    for i in range(m - warm_up):
                        row += [f"F{warm_up + i}", f"B{i}"]
                    rows.append(" ".join(row + [f"B{i}" for i in range(m - warm_up, m)]))
                return rows
            """,
        ),
        Mistake(
            "w-right-after-its-i",
            (
                "The backward is split, and the bubble still too large. Does anybody gain if W always follows its I?",
                "A later rank has I's to send that others wait for: its W's can wait meanwhile. Rank r lets r of "
                "them pile up, and does them at the end, when it would be idle.",
                "Append a W only if more than r are waiting; rank 0 does each at once, the last rank puts off p-1 of "
                "them.",
            ),
            [("(rank if forwards_left else 0)", "0")],
        ),
        Mistake(
            "all-w-at-the-end",
            (
                "The bubble is small. What does a rank hold until the W's are done?",
                "W needs what the forward kept. If all W's come last, all m micro-batches are live, as in GPipe.",
                "Let no more than r W's wait on rank r.",
            ),
            [("len(waiting) > (rank if forwards_left else 0)", "False")],
        ),
        Mistake(
            "forgets-the-rest-of-the-w",
            (
                "Count the I's and the W's of each rank.",
                "What still waits after the last I has to be done as well, before the optimizer steps.",
            ),
            [("row + waiting", "row")],
            when=lambda seen: "a split backward needs both" in seen.error,
        ),
        Mistake(
            "w-before-its-i",
            (
                "Which of the two gradients follows from the other here?",
                "W0 needs I0: the first half of a backward walks through the stage, and leaves what the second half "
                "uses.",
            ),
            [
                (
                    '            row.append(f"I{i}")\n            waiting.append(f"W{i}")\n',
                    '            waiting.append(f"W{i}")\n',
                ),
                (
                    "row.append(waiting.pop(0))\n",
                    'row.append(waiting.pop(0))\n            row.append(f"I{i}")\n',
                ),
            ],
            when=lambda seen: "the gradient of the weights follows" in seen.error,
        ),
    ),
    otherwise=(
        "Draw it: `print(mk.Schedule(split_the_backward, p=3, m=4))`, and compare with the drawing above.",
    ),
)

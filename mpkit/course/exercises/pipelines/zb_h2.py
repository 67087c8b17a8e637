"""No bubble at all: ZB-H2.

ZB-H1 keeps 1F1B's memory and a third of its bubble. With twice the memory nothing is left of the bubble between a
rank's first action and its last:

    p = 3, m = 6     rank 0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5  .  .
                     rank 1 |  . F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5  .
                     rank 2 |  .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

Two things differ from ZB-H1. Rank r warms up with 2(p-1-r) forwards, so that it has work until its first gradient
can be there. And it lets more W's wait, 2r of them as long as forwards are left, then r: they fill the end, which is
as ragged as the beginning. (So the next step can begin on rank 0 while the last rank is still at work: an optimizer
that waits for all ranks would bring the bubble back. The paper checks afterwards instead.)

Budgets: no rank is idle between its first action and its last; at most 2p-1 live micro-batches per rank; and the whole
step is no longer than ZB-H1's. F, I and W take equally long here. There are at least 2p-1 micro-batches, and a rank
does not begin later than its first micro-batch can be there.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, sections 2.2 and 4 and figure 3, bottom.
"""

from __future__ import annotations

from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import makespan
from mpkit.course.framework.schedules import Schedules, live
from mpkit.course.framework.seen import Seen
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
    start="Begin with your ZB-H1, and draw it with `print(mk.Schedule(zb_h2, p=3, m=6))`: where is rank 0 idle, and "
    "with what could it go on meanwhile?",
    mistakes=(
        Mistake(
            "zb-h1",
            (
                "That is ZB-H1. What does rank 0 do between its last warm-up forward and its first I?",
                "It waits until its first micro-batch has been down to the last rank and back: 2(p-1) forwards long, "
                "and it has done p-1. Give it the others as well.",
                "Rank r's warm-up is 2(p-1-r) forwards.",
            ),
            [
                ("warm_up = 2 * (p - 1 - rank)", "warm_up = p - 1 - rank"),
                ("2 * rank if", "rank if"),
                ("else rank)", "else 0)"),
            ],
        ),
        Mistake(
            "b-is-not-split",
            (
                "Where does a rank wait, and for which half of the next rank's backward?",
                "A whole B takes twice as long as a forward, and the rank before waits for all of it. Write I, and W "
                "later.",
            ),
            [
                (
                    '            row.append(f"I{i}")\n            waiting.append(f"W{i}")\n',
                    '            row.append(f"B{i}")\n',
                ),
                ("            if len(waiting) > (2 * rank if forwards_left else rank):\n", ""),
                ("                row.append(waiting.pop(0))\n", ""),
            ],
        ),
        Mistake(
            "w-right-after-its-i",
            (
                "The warm-up is right. On which rank is the next one kept waiting by a W that could have come later?",
                "The last rank gets a micro-batch in each turn, and owes the others an I for each. Its W's can wait: "
                "2r of them on rank r, as long as there are forwards.",
            ),
            [("(2 * rank if forwards_left else rank)", "0")],
        ),
        Mistake(
            "as-many-w-waiting-as-in-zb-h1",
            (
                "Rank r lets r of its W's wait. How many turns is it ahead of rank 0 with its first I?",
                "The first I of rank r comes 2r turns after its first forward less than rank 0's does: so 2r W's can "
                "wait before the first has to be done.",
            ),
            [("2 * rank if forwards_left", "rank if forwards_left")],
        ),
        Mistake(
            "all-w-at-the-end",
            (
                "Nobody waits. What does a rank hold until its W's are done?",
                "W needs what the forward kept: a micro-batch is live until its W. With all W's at the end all m are.",
            ),
            [("len(waiting) > (2 * rank if forwards_left else rank)", "False")],
            when=lambda seen: seen.budget == HELD,
        ),
        Mistake(
            "forgets-the-rest-of-the-w",
            (
                "Count the I's and the W's of each rank.",
                "What still waits after the last I has to be done as well.",
            ),
            [("row + waiting", "row")],
            when=lambda seen: "a split backward needs both" in seen.error,
        ),
    ),
    otherwise=(
        "Draw it: `print(mk.Schedule(zb_h2, p=3, m=6))`, and compare with the drawing above, row by row.",
    ),
)

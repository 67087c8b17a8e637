"""1F1B.

One forward, one backward: a rank's backward begins as soon as its gradient can be there, so memory is freed while the
pipeline is still being filled. The bubble is GPipe's, and a rank holds at most p micro-batches, however many there are.

    p = 3, m = 4     rank 0 | F0 F1 F2  .  .  .  . B0 -- F3 B1 --  . B2 --  . B3 --
                     rank 1 |  . F0 F1  .  . B0 -- F2 B1 -- F3 B2 --  . B3 --  .  .
                     rank 2 |  .  . F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --  .  .  .  .

Each rank has three phases: *warm-up*, forwards only; *steady*, a forward and a backward in turn; *cool-down*, the
backwards that are left. How long the warm-up is depends on the rank: read it off the drawing. There may also be fewer
micro-batches than ranks.

Sources: Narayanan et al., "PipeDream", SOSP 2019, section 3.2; with a flush after each step, as here: Narayanan et
al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2.1.
"""

from __future__ import annotations

from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.schedules import Schedules, bubble, live
from mpkit.course.framework.seen import Seen


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
    solution=one_f_one_b,
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
    after="04-schedules",
    place=50,
    start="Write the row of the last rank first: it has no warm-up at all. Then that of the rank before it. How many "
    "forwards does rank r do before its first backward?",
    mistakes=(
        Mistake(
            "gpipe",
            (
                "The bubble is right. How many micro-batches does a rank hold, and when could it let go of the first?",
                "That is GPipe's order. A rank that has done enough forwards to keep the ones after it busy goes "
                "backward as soon as it can: after the warm-up always one F, then one B.",
                "Rank r's warm-up is p-1-r forwards, not m.",
            ),
            [("warm_up = min(p - 1 - rank, m)", "warm_up = m")],
        ),
        Mistake(
            "the-same-warm-up-everywhere",
            (
                "Look at the last rank: when could its first backward begin, and when does it?",
                "The last rank makes the loss itself, and waits for nobody: no warm-up. Each rank before it warms up "
                "by one forward more than the one after it.",
                "`warm_up = p - 1 - rank`.",
            ),
            [("warm_up = min(p - 1 - rank, m)", "warm_up = min(p - 1, m)")],
        ),
        Mistake(
            "warm-up-too-short",
            (
                "The bubble is too large. Which rank waits in the middle of the step, and for what?",
                "While rank r waits for its first gradient, p-1-r ranks after it want work: it does a forward for "
                "each of them, and then the steady phase begins with one more forward.",
                "Either the warm-up has p-1-r forwards and the steady phase goes F, B; or p-r forwards, and then B, "
                "F.",
            ),
            [("warm_up = min(p - 1 - rank, m)", "warm_up = min(max(p - 2 - rank, 0), m)")],
        ),
        Mistake(
            "the-first-rank-has-the-shortest-warm-up",
            (
                "The ranks wait for each other. Which rank gets its first gradient first, and which last?",
                "Gradients come from the last stage. Rank 0 gets its first one last, so it has the longest warm-up; "
                "yours grows the other way.",
            ),
            [("min(p - 1 - rank, m)", "min(rank, m)")],
            when=lambda seen: "wait for each other" in seen.error or "comes before" in seen.error,
        ),
        Mistake(
            "more-warm-up-than-micro-batches",
            (
                "One case has fewer micro-batches than ranks. How long is rank 0's warm-up there?",
                "There are only m forwards: the warm-up is `min(p - 1 - rank, m)`.",
            ),
            [("min(p - 1 - rank, m)", "p - 1 - rank")],
            when=lambda seen: seen.error and seen.case["microbatches"] < seen.case.ranks,
        ),
        Mistake(
            "no-cool-down",
            (
                "Count the F's and the B's of rank 0.",
                "After the last forward a rank still has as many backwards to do as it did forwards in its warm-up.",
            ),
            [('        row += [f"B{i}" for i in range(m - warm_up, m)]\n', "")],
            when=lambda seen: "is missing" in seen.error or "no row has" in seen.error,
        ),
    ),
    otherwise=("Draw it: `print(mk.Schedule(one_f_one_b, p=3, m=4))`, and compare with the drawing above.",),
)

"""Beat 1F1B under a memory cap.

Four ranks, six micro-batches. 1F1B has a bubble of 1/3 here, and holds four micro-batches on rank 0. You have memory
for *three*, and your bubble has to be below 3/10. A schedule of your own: rows of text, one per rank.

    F2    forward of micro-batch 2          I2    first half of its backward: the gradient of the stage's input
    B2    its whole backward                W2    second half: the gradients of the weights; frees the activations

F, I and W take one second each, B two. `print(mk.Schedule(mine))` draws what you have, and
`mk.simulate(mk.Schedule(mine)).bubble` is what counts; `mk.Schedule(mine).validate(max_live=3)` says whether it fits.
You begin with 1F1B. `mk.explore("1f1b", ranks=4, microbatches=6)` lets you try changes with a picture.

There are many right answers. The best that we know has a bubble of 1/4.

Sources: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; and for less memory than 1F1B, Qi et al., "Pipeline
Parallelism with Controllable Memory", NeurIPS 2024.
"""

from __future__ import annotations

from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.schedules import Schedules, bubble, live
from mpkit.course.framework.seen import Seen

# %% answer
### BEGIN SOLUTION
# instead: mine = """
# instead:     F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
# instead:     F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
# instead:     F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
# instead:     F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
# instead: """
mine = """
    F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
    F0 F1 F2 I0 W0 I1 W1 F3 I2 W2 F4 I3 F5 W3 I4 W4 I5 W5
    F0 F1 F2 I0 W0 I1 W1 I2 W2 F3 I3 F4 W3 F5 I4 W4 I5 W5
    F0 I0 F1 I1 F2 I2 W0 W1 W2 F3 I3 W3 F4 I4 F5 I5 W4 W5
"""
### END SOLUTION


# %% checks
P, M, CAP = 4, 6, 3


def halves(seen: Seen) -> bool:
    """Return whether some backward is split."""
    assert seen.schedule is not None
    return any(action.kind == "W" for row in seen.schedule.rows for action in row)


EXERCISE = Schedules(
    solution=mine,
    called="mine",
    cases=(Case(P, 1, {"microbatches": M}),),
    budgets=(
        Budget("live micro-batches of a rank", live, CAP),
        Budget("bubble", bubble, 0.2999),
    ),
    after="04-schedules",
    place=80,
    start="Begin with 1F1B's rows, from the exercise before, and draw them.",
    mistakes=(
        Mistake(
            "too-much-memory",
            (
                "Which rank holds four micro-batches, and at which forward does it come to that?",
                "Rank 0's warm-up is too long for this cap: it may do three forwards before something is freed. A "
                "micro-batch is freed by its B, or by its W: I frees nothing.",
                "Let rank 0 begin with `F0 F1 F2`, and give it no F3 before a B or W. Then see what the others wait "
                "for.",
            ),
            """
            mine = '''
                F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
                F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
                F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
                F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
            '''
            """,
            when=lambda seen: seen.budget.startswith("live"),
        ),
        Mistake(
            "the-backward-is-whole",
            (
                "It fits, and the bubble is too large. For what does rank 0 wait longest?",
                "With a whole B the gradient takes two seconds per stage on its way up. Split it: I passes the "
                "gradient on after one second, and W fills a hole.",
                "On the last rank: `F0 I0 F1 I1 F2 I2`, and only then the W's. On the others an I, and W right after "
                "it, where memory is short.",
            ),
            """
            mine = '''
                F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
                F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
                F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
                F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
            '''
            """,
            when=lambda seen: seen.budget == "bubble" and not halves(seen),
        ),
        Mistake(
            "w-in-the-way",
            (
                "The backward is split. Draw it: where is a rank idle, and is there a W that it did too early or too "
                "late?",
                "An action that somebody waits for goes before one that nobody waits for: I before W. But a rank at "
                "its cap needs a W before its next F. On which ranks is which of the two true?",
                "The last rank is the only one that can do three I's in a row without waiting. Let it, and let ranks "
                "1 and 2 answer with I W I W before their next F.",
            ),
            """
            mine = '''
                F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
                F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
                F0 F1 I0 W0 F2 I1 F3 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5
                F0 I0 F1 I1 F2 I2 W0 W1 W2 F3 I3 F4 I4 W3 W4 F5 I5 W5
            '''
            """,
            when=lambda seen: seen.budget == "bubble" and halves(seen),
        ),
        Mistake(
            "ranks-wait-for-each-other",
            (
                "The arrows show two ranks, each at an action that waits for the other. Which of them can go first?",
                "Follow one micro-batch: its F goes down the ranks, its I or B up. Wherever a rank does another "
                "micro-batch's before, that one must not need what comes after.",
            ),
            """
            mine = '''
                F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
                F0 F1 I1 F2 I0 W0 W1 F3 I2 W2 F4 I3 F5 W3 I4 W4 I5 W5
                F0 F1 F2 I0 W0 I1 W1 I2 W2 F3 I3 F4 W3 F5 I4 W4 I5 W5
                F0 I0 F1 I1 F2 I2 W0 W1 W2 F3 I3 W3 F4 I4 F5 I5 W4 W5
            '''
            """,
            when=lambda seen: "wait for each other" in seen.error or "comes before" in seen.error,
        ),
    ),
    otherwise=(
        "Read what is wrong with the schedule, and draw it: `print(mk.Schedule(mine))`.",
        "Change one thing at a time, from 1F1B on: first the cap (rank 0 does three forwards), then split the B's.",
    ),
)

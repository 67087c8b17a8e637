"""Interleaved 1F1B.

The bubble is the time that it takes to fill and to drain the pipeline. Shorter stages fill it faster: cut the model
into v p stages, and give each rank v of them, one from each v-th of the model. Rank r holds stages r, r + p, r + 2p ...

    p = 2, v = 2     stage  0   1   2   3
                     rank   0   1   0   1

An action then names its stage: `"2F0"` is stage 2's forward of micro-batch 0. Forwards go in turns of p micro-batches:
p of them through the rank's first stage, the same p through its second, and so on, then the next p. Backwards likewise,
the stages in the other order. From these two lists, `one_by_one` (given) makes 1F1B's three phases, if you say how
long the warm-up is: (v-1)p forwards until a micro-batch has reached the rank's last stage, and 2(p-1-r) more.

The bubble has to be (p-1)/(vm+p-1). p divides m, and backwards are whole.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.2.2 and figure 4. These stages of a rank are called virtual stages there.
"""

from __future__ import annotations

from mpkit.course.exercises.pipelines import one_by_one
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.schedules import Schedules, bubble, in_turns, live
from mpkit.course.framework.seen import Seen


# %% answer
def interleaved(p: int, m: int, v: int) -> list[str]:
    """Return the interleaved 1F1B: a row of text for each of p ranks with v stages each, for m micro-batches."""
    ### BEGIN SOLUTION
    rows = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        turns = [range(first, first + p) for first in range(0, m, p)]
        forwards = [f"{stage}F{i}" for turn in turns for stage in stages for i in turn]
        backwards = [f"{stage}B{i}" for turn in turns for stage in reversed(stages) for i in turn]
        rows.append(one_by_one(forwards, backwards, (v - 1) * p + 2 * (p - 1 - rank)))
    return rows
    ### END SOLUTION


# %% checks
def held(case: Case) -> float:
    """Return how many activations of a stage a rank may hold: vp micro-batches, and p-1 for the longer warm-up."""
    return float(case["virtual_stages"] * case.ranks + case.ranks - 1)


def blocks(seen: Seen) -> bool:
    """Return whether each rank holds consecutive stages: the first rank the first v, and so on."""
    holders = seen.schedule.stage_to_rank if seen.schedule is not None else ()
    return len(holders) > len(set(holders)) and list(holders) == sorted(holders)


EXERCISE = Schedules(
    solution=interleaved,
    cases=(
        Case(2, 1, {"microbatches": 4, "virtual_stages": 2}),
        Case(3, 2, {"microbatches": 6, "virtual_stages": 2}),
        Case(2, 3, {"microbatches": 6, "virtual_stages": 3}),
    ),
    also=("virtual_stages",),
    shape=in_turns,
    budgets=(
        Budget(
            "bubble",
            bubble,
            lambda case: (case.ranks - 1) / (case["virtual_stages"] * case["microbatches"] + case.ranks - 1),
        ),
        Budget("live activations of stages", live, held),
    ),
    after="04-schedules",
    place=60,
    start="Begin with one rank: which stages does it hold? Write its forwards in order, with p = 2, v = 2 and m = 4, "
    "by hand: 0F0 0F1, then the same micro-batches through its other stage.",
    mistakes=(
        Mistake(
            "neighbouring-stages-on-a-rank",
            (
                "Look at the picture: how long does the last rank wait for its first micro-batch?",
                "If rank 0 holds the stages 0 and 1, it is one long stage again, cut in two: the pipeline fills no "
                "faster. Stages that follow each other belong on different ranks.",
                "Rank r holds `range(r, p * v, p)`.",
            ),
            [
                ("range(rank, p * v, p)", "range(rank * v, (rank + 1) * v)"),
                ("(v - 1) * p + 2 * (p - 1 - rank)", "m * v"),
            ],
            when=blocks,
        ),
        Mistake(
            "warm-up-of-1f1b",
            (
                "Rank 0 comes to its first backward. Have enough micro-batches been through its *last* stage by then?",
                "The first backward is of the rank's last stage. Before it, p micro-batches go through each of its "
                "other v-1 stages.",
                "The warm-up is (v-1)p + 2(p-1-r).",
            ),
            [("(v - 1) * p + 2 * (p - 1 - rank)", "p - 1 - rank")],
            when=lambda seen: "a backward needs what its forward kept" in seen.error,
        ),
        Mistake(
            "backwards-through-the-stages-in-forward-order",
            (
                "The arrow shows a backward. Which stage does its gradient come from?",
                "A gradient comes to a rank's last stage first, and goes through its stages from the last to the "
                "first.",
            ),
            [("reversed(stages)", "stages")],
            when=lambda seen: "wait for each other" in seen.error or "the gradient comes from" in seen.error,
        ),
        Mistake(
            "all-micro-batches-through-a-stage-first",
            (
                "How many activations does a rank hold, and why do they grow with m?",
                "A turn is of p micro-batches: these go through all of the rank's stages before the next ones begin. "
                "Yours takes all m through its first stage.",
                "`turns = [range(first, first + p) for first in range(0, m, p)]`, outside of the loop over stages.",
            ),
            [
                ("[range(first, first + p) for first in range(0, m, p)]", "[range(m)]"),
                ("(v - 1) * p + 2", "(v - 1) * m + 2"),
            ],
        ),
        Mistake(
            "names-no-stage",
            (
                "A rank has several stages here. Which one does `F0` mean?",
                "Without a number in front, an action is of the stage that has the rank's own number, each time. "
                "Write the stage: `2F0`.",
            ),
            [('f"{stage}F{i}"', 'f"F{i}"'), ('f"{stage}B{i}"', 'f"B{i}"')],
            when=lambda seen: "stages, and asked for were" in seen.error,
        ),
    ),
    otherwise=(
        "Draw it: `print(mk.Schedule(lambda p, m: interleaved(p, m, 2), p=2, m=4))`, and follow micro-batch 0.",
    ),
)

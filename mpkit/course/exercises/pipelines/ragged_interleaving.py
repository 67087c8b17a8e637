"""Interleaving with any number of micro-batches.

Interleaved 1F1B goes in turns of p micro-batches, and so wants p to divide m. A batch rarely asks. Write the schedule
for any m >= p: v stages per rank, on rank r the stages r, r + p, r + 2p ..., and still the bubble of the paper,
(p-1)/(vm+p-1).

Turns need not have p micro-batches each:

    a turn shorter than p    its first micro-batch is back at a rank before the next stage can have it: ranks wait
    a turn longer than p     nobody waits, but a rank holds more activations while it lasts

So make floor(m/p) turns of at least p micro-batches each, as even as they can be: 5 micro-batches on 2 ranks are a turn
of 3 and one of 2. Put the longer ones first. The first turn then takes the place of p in the warm-up: with L its
length, (v-1)L + 2(p-1-r) forwards on rank r, and from there one forward, one backward (`one_by_one`, given).

Budgets: that bubble, and (v-1)L + 2p - 1 live activations of stages, L = ceil(m / floor(m/p)). Backwards are whole.

Source: Narayanan et al., SC 2021, section 2.2.2, for m divisible by p. PyTorch's ScheduleInterleaved1F1B has even turns
too, and asks that floor(m/p) divides m.
"""

from __future__ import annotations

import re

from mpkit.course.exercises.pipelines import one_by_one
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.schedules import Schedules, bubble, in_turns, live
from mpkit.course.framework.seen import Seen


# %% answer
def ragged(p: int, m: int, v: int) -> list[str]:
    """Return interleaved 1F1B: a row of text for each of p ranks, v stages per rank, m >= p micro-batches."""
    ### BEGIN SOLUTION
    count = m // p
    turns, first = [], 0
    for number in range(count):
        length = m // count + (number < m % count)
        turns.append(range(first, first + length))
        first += length
    rows = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        forwards = [f"{stage}F{i}" for turn in turns for stage in stages for i in turn]
        backwards = [f"{stage}B{i}" for turn in turns for stage in reversed(stages) for i in turn]
        rows.append(one_by_one(forwards, backwards, (v - 1) * len(turns[0]) + 2 * (p - 1 - rank)))
    return rows
    ### END SOLUTION


# %% checks
HELD = "live activations of stages"


def held(case: Case) -> float:
    """Return how many activations of a stage a rank may hold: those of the text."""
    longest = -(-case["microbatches"] // (case["microbatches"] // case.ranks))
    return float((case["virtual_stages"] - 1) * longest + 2 * case.ranks - 1)


def counted(seen: Seen) -> int:
    """Return how many micro-batches a schedule has that was refused for their number; 0 if it was not."""
    number = re.search(r"ranks and (\d+) micro-batches, and asked for were", seen.error)
    return int(number[1]) if number else 0


def first_turn_is_short(seen: Seen) -> bool:
    """Return whether rank 0, as the error draws its row, begins with a turn of p micro-batches."""
    row = seen.error.partition("rank 0 |")[2].partition("\n")[0].split()
    return row.index(f"{seen.case.ranks}F0") == seen.case.ranks


EXERCISE = Schedules(
    solution=ragged,
    cases=(
        Case(2, 1, {"microbatches": 5, "virtual_stages": 2}),
        Case(3, 2, {"microbatches": 11, "virtual_stages": 2}),
        Case(2, 3, {"microbatches": 3, "virtual_stages": 3}),
    ),
    also=("virtual_stages",),
    shape=in_turns,
    budgets=(
        Budget(
            "bubble",
            bubble,
            lambda case: (case.ranks - 1) / (case["virtual_stages"] * case["microbatches"] + case.ranks - 1),
        ),
        Budget(HELD, live, held),
    ),
    after="04-schedules",
    place=65,
    start="Take your answer for interleaved 1F1B. Only `turns` changes, and what the warm-up is counted from: write "
    "the lengths of the turns for m = 11 and p = 3 by hand.",
    mistakes=(
        Mistake(
            "names-micro-batches-that-are-not-there",
            (
                "Which micro-batches does your last turn name, and which are there?",
                "Turns of p end beyond m if p does not divide it. Padding a batch with empty micro-batches would cost "
                "time; here there are m and no more.",
                "Make m // p turns and spread what is left over them.",
            ),
            [
                ("count = m // p", "count = -(-m // p)"),
                ("length = m // count + (number < m % count)", "length = p"),
            ],
            when=lambda seen: counted(seen) > seen.case["microbatches"],
        ),
        Mistake(
            "drops-the-rest",
            (
                "Count the micro-batches in all turns together.",
                "Turns of p micro-batches each leave m % p of them out, and a step trains on all.",
            ),
            [("length = m // count + (number < m % count)", "length = p")],
            when=lambda seen: 0 < counted(seen) < seen.case["microbatches"],
        ),
        Mistake(
            "a-short-last-turn",
            (
                "Look at the last turn in the picture: how long does a rank wait between its stages?",
                "A turn of fewer than p micro-batches comes to its end before the first of them is back from the other "
                "ranks. Spread the rest over the other turns instead.",
                "`m // p` turns of `m // count` micro-batches, and one more in the first `m % count` of them.",
            ),
            [
                ("count = m // p", "count = -(-m // p)"),
                ("length = m // count + (number < m % count)", "length = min(p, m - first)"),
            ],
        ),
        Mistake(
            "one-turn-for-all",
            (
                "How many activations does a rank hold, and why do they grow with m?",
                "With a single turn all m micro-batches go through a rank's first stage before any goes through its "
                "second. As many turns as possible, of at least p each.",
            ),
            [("count = m // p", "count = 1")],
            when=lambda seen: seen.budget == HELD,
        ),
        Mistake(
            "warm-up-counted-from-p",
            (
                "How many micro-batches go through a rank's first stage before the first one reaches its second?",
                "As many as the first turn has, and that is more than p here. The warm-up takes (v-1) times that.",
                "`(v - 1) * len(turns[0]) + 2 * (p - 1 - rank)`",
            ),
            [("(v - 1) * len(turns[0])", "(v - 1) * p")],
            when=lambda seen: "comes before" in seen.error and not first_turn_is_short(seen),
        ),
        Mistake(
            "the-longer-turns-last",
            (
                "The warm-up is counted from the first turn. Is that the longest?",
                "If a later turn is longer, a rank comes to a backward before the micro-batch has been through its "
                "other stages, and ranks wait. Longer turns first.",
                "`m // count + (number < m % count)`: the first m % count turns are one longer.",
            ),
            [("(number < m % count)", "(number >= count - m % count)")],
            when=lambda seen: "comes before" in seen.error and first_turn_is_short(seen),
        ),
    ),
    otherwise=(
        "Draw it: `print(mk.Schedule(lambda p, m: ragged(p, m, 2), p=2, m=5))`, and follow micro-batch 0, then the "
        "first of the second turn.",
    ),
)

"""Balance uneven layers.

A pipeline is as fast as its slowest stage: all the others wait for it, micro-batch after micro-batch. Layers are not
equal: an output layer over a large vocabulary takes as long as many blocks. Given the seconds that each layer takes,
cut them into p contiguous stages so that the slowest stage takes as little as it can:

    seconds   1 1 1 1 1 5       p = 3        1 1 1 | 1 1 | 5      and not   1 1 | 1 1 | 1 5

Return how many layers each stage has: `[3, 2, 1]`. There may be several best cuts. One way is to find, for the
first n layers and k stages, the best cut by trying where the last stage begins (dynamic programming); another, to try
out how small a limit on a stage's seconds can be. Every stage has at least one layer.

It is tried on the simulated clock: a step of GPipe with your stages, and how busy its busiest rank is.
"""

from __future__ import annotations

import random
import re
from itertools import combinations, pairwise

import mpkit as mk
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen


# %% answer
def balance(seconds: list[float], p: int) -> list[int]:
    """Return how many layers each of p stages has, so that the slowest stage is as fast as possible."""
    ### BEGIN SOLUTION
    # best[n]: of the first n layers, in as many stages as there were rounds: (slowest stage, layers by stage)
    best = {0: (0.0, list[int]())}
    for _ in range(p):
        by_first_layers = {}
        for n in range(1, len(seconds) + 1):
            cuts = [
                (max(slowest, sum(seconds[start:n])), [*counts, n - start])
                for start, (slowest, counts) in best.items()
                if start < n
            ]
            if cuts:
                by_first_layers[n] = min(cuts)
        best = by_first_layers
    return best[len(seconds)][1]
    ### END SOLUTION


# %% checks
MICROBATCHES = 4


def layers(case: Case) -> list[float]:
    """Return the seconds of each layer, whole numbers: most are small, a few as large as several others."""
    draw = random.Random(case.seed)
    return [float(draw.randint(1, 5) * (3 if draw.random() < 0.2 else 1)) for _ in range(case["layers"])]


def best(case: Case) -> float:
    """Return the time of the best cut's slowest stage, by trying all cuts."""
    seconds, p = layers(case), case["stages"]
    cuts = ((0, *inner, len(seconds)) for inner in combinations(range(1, len(seconds)), p - 1))
    return min(max(sum(seconds[a:b]) for a, b in pairwise(cut)) for cut in cuts)


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Cut the layers with the answer; return the busy seconds of the busiest rank."""
    assert callable(answer)
    seconds, p = layers(case), case["stages"]
    counts = [int(count) for count in answer(list(seconds), p)]
    if len(counts) != p or sum(counts) != len(seconds) or min(counts) < 1:
        return f"{len(counts)} stages of {sum(counts)} layers: {counts}"
    ends = [sum(counts[: stage + 1]) for stage in range(p)]
    stages = [sum(seconds[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    t = mk.simulate(mk.Plan.gpipe(p, MICROBATCHES), forward=stages, input_grad=stages, weight_grad=stages)
    return max(t.busy)


def expected(case: Case) -> list[object]:
    """Return the best cut's time: a forward, and a backward of twice its time, for each micro-batch."""
    return [3 * MICROBATCHES * best(case)]


def lost(seen: Seen) -> bool:
    """Return whether the cut has fewer layers than there are."""
    match = re.search(r"of (\d+) layers", str(seen.got))
    return match is not None and int(match[1]) < seen.case["layers"]


EXERCISE = OnRanks(
    solution=balance,
    cases=(
        Case(1, 381, {"layers": 9, "stages": 3}),
        Case(1, 51, {"layers": 12, "stages": 4}),
        Case(1, 8, {"layers": 16, "stages": 5}),
        Case(1, 0, {"layers": 7, "stages": 5}),  # three stages would do as well
    ),
    play=play,
    expected=expected,
    result="the seconds of the busiest rank",
    after="05-real-models",
    place=110,
    start="Try it by hand: 1 1 1 1 1 5 in three stages. Where does the last stage begin in the best cut? If you knew "
    "the best cut of the layers before it into two stages, what would be left to decide?",
    mistakes=(
        Mistake(
            "equal-numbers-of-layers",
            (
                "Look at the seconds of each stage, not at its layers. Which one do all the others wait for?",
                "Equal numbers of layers are equal work only if the layers are. Count seconds.",
            ),
            """
            def balance(seconds: list[float], p: int) -> list[int]:
                n = len(seconds)
                return [n // p + (stage < n % p) for stage in range(p)]
            """,
        ),
        Mistake(
            "closes-a-stage-at-the-mean",
            (
                "Where does your cut go wrong: at the first stage, or where the last one has to take what is left?",
                "Filling each stage up to the mean decides one stage at a time, and cannot know what it leaves to "
                "the last. A stage may better stay below the mean, or go beyond it.",
                "Compare whole cuts: the best of n layers into k stages follows from the best of fewer layers into "
                "k-1.",
            ),
            """
            def balance(seconds: list[float], p: int) -> list[int]:
                mean = sum(seconds) / p
                counts, filled = [0], 0.0
                for i, each in enumerate(seconds):
                    left = len(seconds) - i
                    stages_left = p - len(counts)
                    if counts[-1] and stages_left and (filled + each > mean or left <= stages_left):
                        counts.append(0)
                        filled = 0.0
                    counts[-1] += 1
                    filled += each
                return counts
            """,
        ),
        Mistake(
            "smallest-difference",
            (
                "Your stages are alike. Is the slowest as fast as it can be?",
                "What a step takes depends on the slowest stage alone. A cut whose stages differ more can have a "
                "faster slowest one.",
                "Minimise the largest sum, not the largest minus the smallest.",
            ),
            """
            def balance(seconds: list[float], p: int) -> list[int]:
                from itertools import combinations

                def spread(cut):
                    sums = [sum(seconds[a:b]) for a, b in zip(cut, cut[1:])]
                    return max(sums) - min(sums)

                cuts = [(0, *inner, len(seconds)) for inner in combinations(range(1, len(seconds)), p - 1)]
                cut = min(cuts, key=spread)
                return [b - a for a, b in zip(cut, cut[1:])]
            """,
        ),
        Mistake(
            "drops-the-rest",
            (
                "Add up your numbers of layers.",
                "The last stage ends with the last layer, whatever that makes of its seconds.",
            ),
            [("return best[len(seconds)][1]", "return best[len(seconds) - 1][1]")],
            when=lost,
        ),
        Mistake(
            "largest-layers-first",
            (
                "Are your stages contiguous parts of the model, in its order?",
                "Giving each layer, the largest first, to the stage that has least is for work in any order. A stage "
                "holds layers that follow each other: all that can be chosen is where to cut.",
            ),
            """
            def balance(seconds: list[float], p: int) -> list[int]:
                sums, counts = [0.0] * p, [0] * p
                for each in sorted(seconds, reverse=True):
                    least = sums.index(min(sums))
                    sums[least] += each
                    counts[least] += 1
                return counts
            """,
        ),
    ),
    otherwise=("Print the seconds of each stage for 1 1 1 1 1 5 and p = 3; the slowest takes 5.",),
)

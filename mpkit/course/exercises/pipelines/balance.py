"""Balance uneven layers."""

import random
from itertools import combinations, pairwise

from mpkit.course.author import *


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


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Cut the layers with the answer; return the busy seconds of the busiest rank."""
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


EXERCISE = OnRanks(
    cases=(
        Case(1, 381, {"layers": 9, "stages": 3}),
        Case(1, 51, {"layers": 12, "stages": 4}),
        Case(1, 8, {"layers": 16, "stages": 5}),
        Case(1, 0, {"layers": 7, "stages": 5}),  # three stages would do as well
    )
)

"""Ring or tree.

The same all-reduce can go round a ring or along a tree. With a latency α per message and a bandwidth B:

    ring    reduce-scatter, then all-gather: 2(n-1) rounds, in each of which every rank sends 1/n of the bytes
    tree    a binomial tree up (reduce), then down (broadcast). In round k of the way up, the ranks whose number is an
            odd multiple of 2^k send everything to the rank 2^k below them. Down is the same backwards

A message of N bytes takes α + N/B, and a rank of the ring sends and
receives at the same time. So the tree is faster for short
tensors, the ring for long ones. From how many bytes on is the ring at least as fast? That is the number at which NCCL
has to change its algorithm, and this is how it knows.

Return a number of bytes, not rounded; 0 if the ring is never slower. n is any number of ranks from 2 on, not only a
power of two. The check plays both algorithms message by message, and finds the size at which they take equally long.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Callable

import mpkit as mk
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def crossover(latency: float, bandwidth: float, n: int) -> float:
    """Return the bytes from which on a ring all-reduce of n ranks takes no longer than a tree's.

    latency: seconds; bandwidth: bytes per second.
    """
    ### BEGIN SOLUTION
    # instead: ring = ...  # how often does each pay the latency, and the whole bytes over the bandwidth?
    # instead: tree = ...
    # instead: raise NotImplementedError("your turn")
    rounds_of_ring, rounds_of_tree = 2 * (n - 1), 2 * (n - 1).bit_length()
    more_latency = (rounds_of_ring - rounds_of_tree) * latency
    fewer_seconds_per_byte = (rounds_of_tree - rounds_of_ring / n) / bandwidth
    return more_latency / fewer_seconds_per_byte
    ### END SOLUTION


# %% checks
LATENCY = 10.0  # us
BANDWIDTH = 25.0  # GB/s
FEW = 4  # ranks
SOME = 8
MANY = 64
VARIES = {
    "LATENCY": (3.0, 6.0, 10.0, 15.0),
    "BANDWIDTH": (12.5, 25.0, 50.0),
    "FEW": (4, 5, 6),
    "SOME": (8, 9, 12),
    "MANY": (48, 64, 100),
}


def ring(nbytes: float, n: int, latency: float, bandwidth: float) -> float:
    """Return the seconds of a ring, played: in each round every rank waits for its neighbour's part."""
    clock = [0.0] * n
    for _ in range(2 * (n - 1)):
        clock = [max(clock[r], clock[r - 1]) + latency + nbytes / n / bandwidth for r in range(n)]
    return max(clock)


def tree(nbytes: float, n: int, latency: float, bandwidth: float) -> float:
    """Return the seconds of a tree, played: up, and down again."""
    clock = [0.0] * n
    hops = [
        (r, r - step)
        for step in (2**k for k in range((n - 1).bit_length()))
        for r in range(step, n, 2 * step)
    ]
    for source, target in hops + [(b, a) for a, b in reversed(hops)]:
        clock[source] = clock[target] = max(clock[source], clock[target]) + latency + nbytes / bandwidth
    return max(clock)


def meet(slower: Callable[[float], float], far: float = 2.0**40) -> float:
    """Return where a straight, falling line of bytes becomes 0 or less; 0 if it is so everywhere."""
    at_zero = slower(0.0)
    return at_zero * far / (at_zero - slower(far)) if at_zero > 0 else 0.0


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the answer's crossovers for several numbers of ranks."""
    assert callable(answer)
    return [answer(case["latency"] * 1e-6, case["bandwidth"] * 1e9, n) for n in case["of"]]


def expected(case: Case) -> list[list[float]]:
    """Return where the two, as played, take equally long."""
    return [[meet(_ring_less_tree(n, case["latency"] * 1e-6, case["bandwidth"] * 1e9)) for n in case["of"]]]


def _ring_less_tree(n: int, latency: float, bandwidth: float) -> Callable[[float], float]:
    return lambda nbytes: ring(nbytes, n, latency, bandwidth) - tree(nbytes, n, latency, bandwidth)


EXERCISE = OnRanks(
    solution=crossover,
    cases=(
        Case(1, 1, {"latency": LATENCY, "bandwidth": BANDWIDTH, "of": [FEW, SOME, MANY]}),
        Case(1, 2, {"latency": 5.0, "bandwidth": 100.0, "of": [2, 3]}),
        Case(1, 3, {"latency": 30.0, "bandwidth": 12.5, "of": [5, 6, 12, 48, 100]}),
    ),
    play=play,
    expected=expected,
    result="bytes",
    after="13-links-and-collectives",
    place=20,
    start="Write down both times as A + C·N: how often each pays the latency, and how many bytes go one after "
    "the other. "
    "Then set them equal, and solve for N.",
    mistakes=(
        Mistake(
            "latency-over-bandwidth",
            (
                "By which factor does your result change if the bandwidth doubles? And by which should it?",
                "A message of N bytes takes α + N/B. With twice the bandwidth, the crossover comes at twice the bytes: "
                "multiply by the bandwidth.",
            ),
            [
                (
                    "(rounds_of_tree - rounds_of_ring / n) / bandwidth",
                    "(rounds_of_tree - rounds_of_ring / n) * bandwidth",
                )
            ],
        ),
        Mistake(
            "whole-tensors-round-the-ring",
            (
                "How many bytes does each message of the ring have?",
                "A ring cuts the tensor into n parts: 2(n-1) messages of N/n each. That is what makes it good for long "
                "tensors: 2(n-1)/n · N/B, whatever n is.",
            ),
            [("rounds_of_ring / n)", "rounds_of_ring)")],
        ),
        Mistake(
            "one-way-ring",
            (
                "After n-1 rounds of the ring, what does each rank have?",
                "One part of the sum (that is a reduce-scatter). Another n-1 rounds hand the parts round.",
            ),
            [("2 * (n - 1), 2", "n - 1, 2")],
        ),
        Mistake(
            "one-way-tree",
            (
                "When the tree's root has the sum, who else has it?",
                "Nobody: it has to go down again. That is as many rounds as the way up.",
            ),
            [("2 * (n - 1).bit_length()", "(n - 1).bit_length()")],
        ),
        Mistake(
            "a-tree-cuts-nothing",
            (
                "Does a message of the tree get shorter on its way?",
                "Each rank of a tree sends all bytes, up and down: 2 ceil(log2 n) · N/B. It sends no parts.",
            ),
            [("(rounds_of_tree - rounds_of_ring / n)", "abs(rounds_of_tree - rounds_of_ring) / n")],
        ),
        Mistake(
            "natural-logarithm",
            (
                "How many rounds does a tree of 8 ranks take to the root?",
                "Three: in each round half of those that are left send. That is the logarithm to the base 2; "
                "`math.log` has the base e.",
            ),
            [("2 * (n - 1).bit_length()", '2 * __import__("math").log(n)')],
        ),
        Mistake(
            "powers-of-two-only",
            (
                "4, 8 and 64 ranks are right. How many rounds does a tree of 5 ranks take?",
                "Three, as one of 8 does: rank 4 needs a round of its own. Round the logarithm up.",
            ),
            [("2 * (n - 1).bit_length()", '2 * __import__("math").log2(n)')],
        ),
        Mistake(
            "rounds-down",
            (
                "4, 8 and 64 ranks are right. How many rounds does a tree of 5 ranks take?",
                "Three, as one of 8 does: rank 4 needs a round of its own. Round the logarithm up, not down.",
            ),
            [("2 * (n - 1).bit_length()", "2 * (n.bit_length() - 1)")],
        ),
        Mistake(
            "one-rank-too-many",
            (
                "How many rounds does a ring of 2 ranks take, there and back?",
                "A rank has n-1 others: n-1 rounds for the sum, and n-1 to hand it round.",
            ),
            [("2 * (n - 1), 2", "2 * n, 2")],
        ),
    ),
    otherwise=(
        "Take n = 4: the ring has 6 rounds of N/4, the tree 4 rounds of N. At which N do both take equally long?",
    ),
)

"""Ring or tree."""

from mpkit.course.author import *


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


def seconds_of_a_ring(nbytes: float, n: int, latency: float, bandwidth: float) -> float:
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


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the answer's crossovers for several numbers of ranks."""
    return [answer(case["latency"] * 1e-6, case["bandwidth"] * 1e9, n) for n in case["of"]]


def expected(case: Case) -> list[list[float]]:
    """Return where the two, as played, take equally long."""
    link = case["latency"] * 1e-6, case["bandwidth"] * 1e9

    def crossover_of(n: int) -> float:
        return meet(lambda nbytes: seconds_of_a_ring(nbytes, n, *link) - tree(nbytes, n, *link))

    return [[crossover_of(n) for n in case["of"]]]


EXERCISE = OnRanks(
    cases=(
        Case(1, 1, {"latency": LATENCY, "bandwidth": BANDWIDTH, "of": [FEW, SOME, MANY]}),
        Case(1, 2, {"latency": 5.0, "bandwidth": 100.0, "of": [2, 3]}),
        Case(1, 3, {"latency": 30.0, "bandwidth": 12.5, "of": [5, 6, 12, 48, 100]}),
    )
)

"""Benchmark a link."""

from mpkit.course.author import *

# %% given
from mpkit.course.lab.timed_link import TimedLink


# %% answer
def benchmark(link: TimedLink, sizes: list[int]) -> dict[str, float | str]:
    """Return the link's "latency" in microseconds, its "bandwidth" in GB/s, and the "algorithm" of its all-reduce.

    link: it has `link.ranks` ranks: 2 or 4.
    sizes: two or more sizes to measure with, in bytes, ascending: multiples of 4.
    """
    ### BEGIN SOLUTION
    n = link.ranks

    def seconds(call: Callable[[Tensor], None], size: int) -> float:
        """Return how long a call takes: the median of some, without the first."""
        tensor = torch.zeros(size // 4)
        times = []
        for _ in range(6):
            link.barrier()
            begin = link.clock()
            call(tensor)
            link.synchronize()
            times.append(link.clock() - begin)
        return sorted(times[1:])[2]

    one_way = [seconds(link.ping_pong, size) / 2 for size in sizes]
    beta = (one_way[-1] - one_way[0]) / (sizes[-1] - sizes[0])
    alpha = one_way[0] - beta * sizes[0]
    took = seconds(link.all_reduce, sizes[-1])
    predicted = {
        "ring": 2 * (n - 1) * (alpha + beta * sizes[-1] / n),
        "tree": 2 * (n - 1).bit_length() * (alpha + beta * sizes[-1]),
    }
    algorithm = min(predicted, key=lambda name: abs(predicted[name] - took))
    return {"latency": alpha * 1e6, "bandwidth": 1e-9 / beta, "algorithm": algorithm}
    ### END SOLUTION


# %% checks
SIZES = [4096, 32768, 131072]
KEYS = ("latency", "bandwidth", "algorithm")


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run the answer on a link of the case's sizes."""
    link = TimedLink(ctx, case["latency"] * 1e-6, case["bandwidth"] * 1e9, case["all_reduce"], seed=case.seed)
    return answer(link, list(SIZES))


def expected(case: Case) -> list[dict[str, object]]:
    """Return what the link was made with."""
    return [
        dict(zip(KEYS, (case["latency"], case["bandwidth"], case["all_reduce"]), strict=True))
    ] * case.ranks


EXERCISE = OnRanks(
    cases=(
        Case(2, 1, {"latency": 20.0, "bandwidth": 12.5, "all_reduce": "ring"}),
        Case(4, 2, {"latency": 5.0, "bandwidth": 3.0, "all_reduce": "tree"}),
        Case(4, 3, {"latency": 8.0, "bandwidth": 25.0, "all_reduce": "ring"}),
        Case(4, 4, {"latency": 60.0, "bandwidth": 40.0, "all_reduce": "tree"}),
    )
)

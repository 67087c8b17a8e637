"""Benchmark a link.

How long does a message of N bytes take? α + N/B: a latency α, which is there however short the message is, and N over
the bandwidth B. Measure both. Then find out how the all-reduce of this link works, by how long it takes on n ranks:

    ring    2(n-1) messages, one after the other, of N/n bytes each
    tree    2 log2(n) messages, one after the other, of N bytes each

You are given a `link` that behaves as NCCL's on GPUs do, and whose clock counts:

- `link.ping_pong(tensor)` sends a tensor to the neighbour and back; `link.all_reduce(tensor)` sums it over all ranks.
  Both *start* something and return at once. `link.synchronize()` waits until it is complete.
- `link.clock()` is this rank's time in seconds. `link.barrier()` waits until all ranks are here: between two
  measurements each is busy with something else for a while, and nothing starts before the last rank has come.
- The first call of each kind and size is slow, and any other may be interrupted, at most one in four. Repeat each
  measurement, leave out the first, and take the median.

Return `{"latency": α in microseconds, "bandwidth": B in GB/s (1e9 bytes), "algorithm": "ring" or "tree"}`, the same on
every rank. Numbers may be off by 0.01 %. To try it in a cell:

```python
def try_it(ctx):
    return benchmark(TimedLink(ctx, latency=5e-6, bandwidth=10e9, algorithm="ring"), [4096, 65536, 262144])

mk.Cluster(ranks=4).run(try_it)
```

Source: Hockney, "The communication challenge for MPP", Parallel Computing 1994 (the model); Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.equal import difference
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen

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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer on a link of the case's sizes."""
    assert callable(answer)
    link = TimedLink(ctx, case["latency"] * 1e-6, case["bandwidth"] * 1e9, case["all_reduce"], seed=case.seed)
    return answer(link, list(SIZES))


def expected(case: Case) -> list[dict[str, object]]:
    """Return what the link was made with."""
    return [
        dict(zip(KEYS, (case["latency"], case["bandwidth"], case["all_reduce"]), strict=True))
    ] * case.ranks


def _times_too_large(seen: Seen, name: str, factor: float) -> bool:
    """Return whether a number is too large by this factor."""
    assert seen.got is not None
    return difference(factor * seen.expected[0][name], seen.got[0][name]) is None


def _only_the_algorithm(seen: Seen, name: str) -> bool:
    """Return whether everything is right but the algorithm, which the answer takes for this one."""
    assert seen.got is not None
    return difference({**seen.expected[0], "algorithm": name}, seen.got[0]) is None


EXERCISE = OnRanks(
    solution=benchmark,
    cases=(
        Case(2, 1, {"latency": 20.0, "bandwidth": 12.5, "all_reduce": "ring"}),
        Case(4, 2, {"latency": 5.0, "bandwidth": 3.0, "all_reduce": "tree"}),
        Case(4, 3, {"latency": 8.0, "bandwidth": 25.0, "all_reduce": "ring"}),
        Case(4, 4, {"latency": 60.0, "bandwidth": 40.0, "all_reduce": "tree"}),
    ),
    play=play,
    expected=expected,
    result="latency, bandwidth and algorithm",
    after="13-links-and-collectives",
    place=10,
    start="First write a function that measures one call with one size: barrier, clock, call, synchronize, clock. "
    "Repeat it, and take the median. Everything else is arithmetic.",
    mistakes=(
        Mistake(
            "does-not-wait-for-the-link",
            (
                "You get a latency of a few microseconds, whatever the link. What has happened when the call returns?",
                "The call starts something and returns. Between the two clocks there has to be a "
                "`link.synchronize()`, as there has to be a `torch.cuda.synchronize()` on a GPU.",
            ),
            [("            link.synchronize()\n", "")],
            when=lambda seen: "ZeroDivision" in seen.error or (seen.got and seen.got[0]["latency"] < 2.5),
        ),
        Mistake(
            "ranks-come-unevenly",
            (
                "The ranks do not agree on their times. From when on does a rank that is early wait?",
                "Nothing starts before the last rank has come, so an early rank measures how late the others are. "
                "Align them first: `link.barrier()` before the first clock.",
            ),
            [("            link.barrier()\n", "")],
            when=lambda seen: seen.got and seen.got[0] != seen.got[1],
        ),
        Mistake(
            "the-mean-of-everything",
            (
                "Print all times of one size. Do you want their mean?",
                "The first call connects the ranks, and some are interrupted. A mean has all of that in it; the "
                "median (or the minimum) of the others has not.",
            ),
            [("return sorted(times[1:])[2]", "return sum(times) / len(times)")],
        ),
        Mistake(
            "the-mean-of-the-rest",
            (
                "Without the first call, is the mean what a call takes?",
                "Now and then a call is interrupted, and takes three times as long. The mean of five calls has that "
                "in it; their median has not.",
            ),
            [("return sorted(times[1:])[2]", "return sum(times[1:]) / 5")],
        ),
        Mistake(
            "there-and-back",
            (
                "The latency is twice what it should be. How many messages is a ping-pong?",
                "Two, one after the other: a message takes half of the time.",
            ),
            [("seconds(link.ping_pong, size) / 2", "seconds(link.ping_pong, size)")],
            when=lambda seen: _times_too_large(seen, "latency", 2),
        ),
        Mistake(
            "one-size-for-each",
            (
                "Is there no latency in the time of the largest message, and no byte in the smallest?",
                "Both are in both. Two sizes give two equations: the slope between them is 1/B, and what is left at 0 "
                "bytes is α.",
            ),
            [
                ("(one_way[-1] - one_way[0]) / (sizes[-1] - sizes[0])", "one_way[-1] / sizes[-1]"),
                ("one_way[0] - beta * sizes[0]", "one_way[0]"),
            ],
        ),
        Mistake(
            "bits-and-bytes",
            (
                "By which factor is the bandwidth wrong?",
                "By 8: networks are sold in Gbit/s, and GB/s are bytes.",
            ),
            [('"bandwidth": 1e-9 / beta', '"bandwidth": 8e-9 / beta')],
            when=lambda seen: _times_too_large(seen, "bandwidth", 8),
        ),
        Mistake(
            "always-a-ring",
            (
                "Latency and bandwidth are right. Compare the all-reduce's time with both predictions.",
                "A ring of 4 sends 6 messages of a quarter, a tree 4 of the whole. Put the α and B that you have "
                "measured into both, and take the one that is nearer to the measured time.",
            ),
            [
                (
                    "algorithm = min(predicted, key=lambda name: abs(predicted[name] - took))",
                    'algorithm = "ring"',
                )
            ],
            when=lambda seen: _only_the_algorithm(seen, "ring"),
        ),
        Mistake(
            "whole-tensors-round-the-ring",
            (
                "How many bytes does a message of a ring's all-reduce have?",
                "The tensor is cut into n parts, and each of the 2(n-1) messages is one of them: N/n bytes.",
            ),
            [("(alpha + beta * sizes[-1] / n)", "(alpha + beta * sizes[-1])")],
            when=lambda seen: _only_the_algorithm(seen, "tree"),
        ),
    ),
    otherwise=(
        "Print what you have measured for each size, in microseconds, on rank 0 and on rank 1. They should be the "
        "same, and lie on a line.",
    ),
)

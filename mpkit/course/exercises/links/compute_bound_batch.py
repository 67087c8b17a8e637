"""When the link does not matter any more."""

from __future__ import annotations

import mpkit as mk
from mpkit.course.framework.exercise import Answer, Case
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def compute_bound_batch(
    layers: list[tuple[int, float]], n: int, flops: float, latency: float, bandwidth: float
) -> int:
    """Return the smallest number of samples per rank for which all communication but the first layer's is hidden.

    layers: (parameters, FLOPs of the forward per sample), the first layer first; two or more.
    n: ranks, 2 or more. flops: per second, of a rank. latency: seconds. bandwidth: bytes per second.
    """
    ### BEGIN SOLUTION
    took = [2 * (n - 1) * (latency + 4 * parameters / n / bandwidth) for parameters, _ in layers]
    backward = [2 * of_layer / flops for _, of_layer in layers]  # seconds per sample
    most = 0.0
    for i in range(1, len(layers)):
        # the all-reduces of layers i to 1, from when layer i is ready, behind the backwards of layers i-1 to 0
        most = max(most, sum(took[1 : i + 1]) / sum(backward[:i]))
    samples = 1
    while samples < most:
        samples += 1
    return samples
    ### END SOLUTION


# %% checks
STACKS = {
    "even": [(9_000_000, 8e9)] + [(4_000_000, 8e9)] * 5,
    "a large head": [(1_000_000, 6e9)] * 7 + [(80_000_000, 8e9)],
    "a large middle": [(300_000, 9e9), (30_000_000, 3e9), (900_000, 5e9), (2_000_000, 7e9)],
    "small": [(30_000, 4e11), (20_000, 4e11)],
}


def hidden(layers: list[tuple[int, float]], case: Case, samples: int) -> bool:
    """Play a backward; return whether all all-reduces but the last one are complete at its end."""
    now = link = 0.0
    n = case["of"]
    for number in reversed(range(len(layers))):
        parameters, of_layer = layers[number]
        now += 2 * of_layer * samples / (case["teraflops"] * 1e12)
        if number == 0:
            return link <= now
        link = max(link, now)
        for _ in range(2 * (n - 1)):
            link += case["latency"] * 1e-6 + 4 * parameters / n / (case["bandwidth"] * 1e9)
    raise AssertionError("there is a first layer")


def expected(case: Case) -> list[int]:
    """Return the first number of samples for which a step, as played, is compute-bound."""
    samples = 1
    while not hidden(STACKS[case["model"]], case, samples):
        samples += 1
    return [samples]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the answer's number of samples."""
    link = case["latency"] * 1e-6, case["bandwidth"] * 1e9
    return answer(list(STACKS[case["model"]]), case["of"], case["teraflops"] * 1e12, *link)


def _case(model: str, of: int, teraflops: float, latency: float, bandwidth: float) -> Case:
    sizes = {"model": model, "of": of, "teraflops": teraflops, "latency": latency, "bandwidth": bandwidth}
    return Case(1, of, sizes)


EXERCISE = OnRanks(
    solution=compute_bound_batch,
    cases=(
        _case("even", 4, 500.0, 40.0, 12.5),
        _case("a large head", 8, 100.0, 5.0, 25.0),
        _case("a large middle", 2, 150.0, 20.0, 12.5),
        _case("even", 256, 50.0, 8.0, 100.0),
        _case("small", 2, 100.0, 2.0, 100.0),
    ),
    play=play,
    expected=expected,
    result="samples per rank",
    after="13-links-and-collectives",
    place=30,
)

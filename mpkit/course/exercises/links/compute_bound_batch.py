"""When the link does not matter any more.

Under DDP each rank computes on its own samples, and all-reduces the gradients of all layers. The more samples a rank
has, the longer its backward takes; the all-reduces take as long as before. From some batch on they are hidden behind
the backward: training is *compute-bound* then, and a faster link would bring nothing.

    compute   F0 F1 F2 F3 │ B3 ━━━━━ B2 ━━━━━ B1 ━━━━━ B0 ━━━━━
    comm                            ──3──    ──2──    ──1──    ──0──

- A layer with p parameters and f FLOPs per sample in its forward: the backward takes 2f per sample.
- A layer's all-reduce starts when its backward is over and the link is free (one all-reduce at a time, the last layer's
  first). It goes round a ring of n ranks: 2(n-1) rounds, each α + N/(n B), where N = 4p bytes.
- The first layer's all-reduce can hide behind nothing. So compute-bound means: when the backward ends, the all-reduces
  of all *other* layers are complete.

Return the smallest number of samples per rank, 1 or more, for which a step is compute-bound. The check plays the
step layer by layer, for ever more samples.

Sources: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2; McCandlish et al. 2018 on what large batches cost.
"""

from __future__ import annotations

import mpkit as mk
from mpkit.course.framework.exercise import Case, Mistake
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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the answer's number of samples."""
    assert callable(answer)
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
    start="First two lists: how many seconds each layer's all-reduce takes, and how many its backward takes per "
    "sample. "
    "Then ask of each layer: what has to be over when the backward ends, and since when could it run?",
    mistakes=(
        Mistake(
            "hides-behind-the-forward",
            (
                "When is the first gradient there?",
                "Not before the forward is over. Only the backward can hide an all-reduce, and it takes 2f per sample.",
            ),
            [("2 * of_layer / flops", "3 * of_layer / flops")],
        ),
        Mistake(
            "the-backward-is-a-forward",
            (
                "How many FLOPs does a backward take, beside its forward?",
                "Twice as many: a product for the gradients of the inputs, and one for those of the weights.",
            ),
            [("2 * of_layer / flops", "of_layer / flops")],
        ),
        Mistake(
            "half-a-ring",
            (
                "How many rounds does an all-reduce take on a ring?",
                "n-1 for the reduce-scatter, and n-1 for the all-gather: 2(n-1).",
            ),
            [("2 * (n - 1) * (latency", "(n - 1) * (latency")],
        ),
        Mistake(
            "whole-tensors-round-the-ring",
            (
                "How many bytes does each round of the ring send?",
                "An n-th of the gradients: 4p/n bytes.",
            ),
            [("4 * parameters / n / bandwidth", "4 * parameters / bandwidth")],
        ),
        Mistake(
            "no-latency",
            (
                "Bandwidth alone gives too few samples. What else does each of the 2(n-1) rounds pay?",
                "The latency: on many ranks it is most of the time.",
            ),
            [("(latency + 4", "(0.0 + 4")],
        ),
        Mistake(
            "all-of-it-or-nothing",
            (
                "Which all-reduce can hide behind nothing?",
                "The first layer's: its gradient comes last. If it had to be hidden, no batch would be enough; it is "
                "left out of the count.",
            ),
            [("sum(took[1 : i + 1])", "sum(took[: i + 1])")],
        ),
        Mistake(
            "behind-its-own-backward",
            (
                "Can the last layer's all-reduce run while the last layer's backward does?",
                "No: it starts when that is over. Layer i hides behind the layers i-1 to 0.",
            ),
            [("sum(backward[:i])", "sum(backward[: i + 1])")],
        ),
        Mistake(
            "sums-only",
            (
                "The sum of the all-reduces is shorter than the backward. Does each of them start early enough?",
                "A large layer at the front is ready late, and has only the layers before it to hide behind. Ask "
                "for each layer i: do the all-reduces of layers i to 1 fit behind the backwards of i-1 to 0?",
            ),
            [("for i in range(1, len(layers))", "for i in range(len(layers) - 1, len(layers))")],
        ),
        Mistake(
            "one-by-one",
            (
                "Each all-reduce is shorter than the backwards that are left. Do they share the link?",
                "They go one after the other: the link has to do those of layers i to 1 in that time.",
            ),
            [("sum(took[1 : i + 1])", "took[i]")],
        ),
        Mistake(
            "the-whole-batch",
            (
                "By which factor is it too large?",
                "By n: the batch of all ranks is n times that of one, and the question is about one.",
            ),
            [("return samples", "return n * samples")],
        ),
        Mistake(
            "rounded-down",
            (
                "Try your number and the one above it. For which is the link idle when the backward ends?",
                "A bit of a sample is missing. Round up; and a rank has at least one sample.",
            ),
            [("while samples < most:", "while samples <= most - 1:")],
        ),
    ),
    otherwise=(
        "Draw the backward and the link below it, for one and for many samples. In the end, which all-reduces "
        "are left?",
    ),
)

"""Choose the degrees."""

from mpkit.course.author import *


# %% given
def parameters(model: dict[str, int]) -> int:
    """Return ψ, the number of the layers' parameters; embeddings are left out."""
    return 12 * model["layers"] * model["width"] ** 2


def seconds(model: dict[str, int], cluster: dict[str, int], batch: int, pp: int, dp: int, tp: int) -> float:
    """Return the time of a 1F1B step: compute and tp's messages, with the bubble; then the gradients' all-reduce."""
    tokens, microbatches = model["sequence"], batch // dp
    flops = 6 * parameters(model) * tokens / (pp * tp)
    stream = 2 * tokens * model["width"]  # bytes of one sample's activations between layers
    talk = 8 * stream * (tp - 1) / tp * model["layers"] / pp / cluster["bytes per second in a node"]
    steady = (flops / cluster["flops per second"] + talk) * (microbatches + pp - 1)
    reduce = 2 * 2 * parameters(model) / (pp * tp) * (dp - 1) / dp / cluster["bytes per second between nodes"]
    return steady + reduce


# %% answer
def choose_the_degrees(model: dict[str, int], cluster: dict[str, int], batch: int) -> dict[str, int] | None:
    """Return the possible mesh with the shortest step: {"pp": ..., "dp": ..., "tp": ...}, or None.

    model: "layers", "width", "heads", "sequence".
    cluster: "gpus", "gpus a node", "bytes a gpu", and the speeds that `seconds` uses.
    """
    ### BEGIN SOLUTION
    gpus, layers = cluster["gpus"], model["layers"]
    possible = []
    for tp in range(1, min(cluster["gpus a node"], gpus) + 1):
        for pp in range(1, gpus // tp + 1):
            dp = gpus // (pp * tp)
            if pp * dp * tp != gpus or model["heads"] % tp or layers % pp or batch % dp:
                continue
            states = 16 * parameters(model) / (pp * tp)
            of_one = 34 * model["sequence"] * model["width"] * layers / pp / tp
            if states + of_one * min(pp, batch // dp) <= cluster["bytes a gpu"]:
                possible.append((seconds(model, cluster, batch, pp, dp, tp), {"pp": pp, "dp": dp, "tp": tp}))
    return min(possible, key=lambda each: each[0])[1] if possible else None
    ### END SOLUTION


# %% checks
MODELS = {
    "1.3B": {"layers": 24, "width": 2048, "heads": 16, "sequence": 8192},
    "6.7B": {"layers": 32, "width": 4096, "heads": 32, "sequence": 4096},
    "22B": {"layers": 48, "width": 6144, "heads": 64, "sequence": 4096},
    "76B": {"layers": 60, "width": 10240, "heads": 80, "sequence": 2048},
    "175B": {"layers": 96, "width": 12288, "heads": 96, "sequence": 2048},
}


def cluster_of(case: Case) -> dict[str, int]:
    """Return a cluster: GPUs of 40 or 80 GB at half their peak, NVLink 3 inside nodes, InfiniBand between them."""
    return {
        "gpus": case["gpus"],
        "gpus a node": case["a_node"],
        "bytes a gpu": case["memory"] * 10**9,
        "flops per second": 156 * 10**12,
        "bytes per second in a node": 211 * 10**9,
        "bytes per second between nodes": 100 * 10**9,
    }


def expected(case: Case) -> list[object]:
    """Return the best mesh: all are tried.

    >>> expected(Case(1, sizes={"model": "22B", "gpus": 24, "a_node": 8, "memory": 32, "batch": 128}))
    [{'pp': 6, 'dp': 1, 'tp': 4}]
    """
    return [choose_the_degrees(MODELS[case["model"]], cluster_of(case), case["batch"])]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the mesh that the answer chooses."""
    return answer(dict(MODELS[case["model"]]), cluster_of(case), case["batch"])


EXERCISE = OnRanks(
    cases=(
        Case(1, 1, {"model": "1.3B", "gpus": 8, "a_node": 8, "memory": 80, "batch": 64}),
        Case(1, 2, {"model": "22B", "gpus": 24, "a_node": 8, "memory": 32, "batch": 128}),
        Case(1, 3, {"model": "22B", "gpus": 24, "a_node": 4, "memory": 80, "batch": 16}),
        Case(1, 4, {"model": "175B", "gpus": 16, "a_node": 8, "memory": 80, "batch": 64}),
        Case(1, 6, {"model": "6.7B", "gpus": 16, "a_node": 2, "memory": 32, "batch": 4}),
        Case(1, 5, {"model": "76B", "gpus": 64, "a_node": 8, "memory": 80, "batch": 32}),
    )
)

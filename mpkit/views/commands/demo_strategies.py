"""The strategies that the demo knows: their plans, and what there is to be seen in their pictures."""

from __future__ import annotations

from collections.abc import Callable

from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import GPIPE, NAIVE, ONE_F_ONE_B, ZB_H1

__all__ = ["SEEN", "STRATEGIES"]


def _replicas(ranks: int, each: int) -> int:
    """Return the number of replicas if each takes `each` ranks; there must be two or more."""
    if ranks < 2 * each or ranks % each:
        raise ValueError(
            f"--ranks {ranks}: this strategy takes two replicas or more, of {each} ranks each: --ranks {2 * each}"
        )
    return ranks // each


STRATEGIES: dict[str, Callable[[int, int], tuple[str, Plan]]] = {
    NAIVE: lambda n, m: ("naive MP", Plan.naive_mp(n)),
    GPIPE: lambda n, m: (f"GPipe, m={m}", Plan.gpipe(n, m)),
    "gpipe-recompute": lambda n, m: ("GPipe, recomputing", Plan.gpipe(n, m, recompute="full")),
    ONE_F_ONE_B: lambda n, m: (f"1F1B, m={m}", Plan.pipeline(ONE_F_ONE_B, n, m)),
    "zb-h1": lambda n, m: (f"ZB-H1, m={m}", Plan.pipeline(ZB_H1, n, m)),
    "dp": lambda n, m: ("DP", Plan(dp=n, data_parallel="dp")),
    "ddp": lambda n, m: ("DDP", Plan.ddp(n)),
    "zero1": lambda n, m: ("ZeRO-1", Plan(dp=n, zero=1)),
    "zero2": lambda n, m: ("ZeRO-2", Plan(dp=n, zero=2)),
    "zero3": lambda n, m: ("ZeRO-3", Plan(dp=n, zero=3)),
    "tp": lambda n, m: ("TP", Plan(tp=n)),
    "2d": lambda n, m: ("ZeRO-3 x TP", Plan(dp=_replicas(n, 2), tp=2, zero=3)),
    "3d": lambda n, m: (
        "PP x DP x TP, ZeRO-1",
        Plan(pp=2, dp=_replicas(n, 4), tp=2, zero=1, schedule=ONE_F_ONE_B, microbatches=m),
    ),
}
"""By the option's value: a function of ranks and micro-batches that returns the name in the table, and the plan."""


SEEN = {
    "serial": "The same model on one rank: what all others are compared with, in time and in losses.",
    NAIVE: "One stage works while all others wait for its result: a staircase down, and one up again.",
    GPIPE: "Cut into micro-batches, a batch lets the stages work at the same time. What is left of the bubble is the "
    "beginning, while the last stages wait for their first input, and the end, while the first ones have finished.",
    "gpipe-recompute": "Each stage keeps its inputs only. Each backward begins by computing the forward again (light "
    "blue, in the thin row below it): less memory, more time.",
    ONE_F_ONE_B: "Each stage alternates between forwards and backwards as soon as it can, and so holds the activations "
    "of few micro-batches. The bubble is as large as GPipe's.",
    "zb-h1": "Backwards are split: the half that the stage before waits for (red), and the gradients of the weights "
    "(yellow), which fill what would be bubble.",
    "dp": "One rank spreads the weights and the batch, and gathers the results, in every step: the others wait for it.",
    "ddp": "Each rank has the whole model and its own samples. Gradients are summed among the ranks (pink) while the "
    "backward is still going on.",
    "zero1": "As DDP, but each rank keeps its share of the optimizer's state only, updates its share of the weights, "
    "and gathers the others'.",
    "zero2": "As ZeRO-1, and of the gradients too each rank keeps its share only.",
    "zero3": "Each rank keeps its share of the weights too. It gathers each block's weights before their use (pink) "
    "and frees them afterwards: more is sent, less is held. The block at the very end (compute) gathers the model that "
    "was trained.",
    "tp": "Each layer is divided among the ranks, which all compute the same samples and sum their results (pink) in "
    "every layer.",
    "2d": "Layers are divided between pairs of ranks, and model states among the replicas.",
    "3d": "Stages of layers, replicas of each stage, and divided layers in each replica, together.",
}
"""By the option's value: what there is to be seen in its picture."""

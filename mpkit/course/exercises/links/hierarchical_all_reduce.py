"""A hierarchical all-reduce.

Inside a node GPUs talk over NVLink, between nodes over a network that is some ten times slower. A flat all-reduce
does not know that. A hierarchical one has three phases:

    1. inside     reduce-scatter among the k ranks of a node: each has 1/k of the node's sum
    2. between    all-reduce that k-th with the ranks of the other nodes that have the same one
    3. inside     all-gather among the k ranks of the node

All k ranks of a node send over the network at the same time, each through a card of its own, and each a k-th only.

Node j has the ranks jk to jk+k-1. Every rank returns the sum over all ranks; k divides the tensor's length.
`ctx.comm.group(ranks)` makes a communicator, which has the same collectives: `group.reduce_scatter(tensor)`. *All*
ranks have to make each group, in the same order, whether they are members or not.

Budget, per rank, with N bytes and m nodes: 2(m-1)/m · N/k bytes between nodes (counted on a ring), and
2(k-1)/k · N bytes inside of the node. With more than one node, nothing else may cross.

Source: Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", 2018, section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.devices.hardware import wire_factor
from mpkit.trace import Kind, Lane


# %% answer
def hierarchical_all_reduce(ctx: mk.Context, tensor: Tensor, k: int) -> Tensor:
    """Return the sum of all ranks' tensors.

    tensor: [length], the same length on each rank, a multiple of k.
    k: the ranks of each node; ctx.world_size is a multiple of it.
    """
    ### BEGIN SOLUTION
    n = ctx.world_size
    nodes = [ctx.comm.group(range(first, first + k)) for first in range(0, n, k)]
    across = [ctx.comm.group(range(place, n, k)) for place in range(k)]
    node, others = nodes[ctx.rank // k], across[ctx.rank % k]
    part = node.reduce_scatter(tensor)
    part = others.all_reduce(part)
    return node.all_gather(part)
    ### END SOLUTION


# %% checks
LENGTH = 24
BETWEEN, INSIDE = "bytes that a rank sends between nodes", "bytes that a rank sends inside of its node"


def given(case: Case, rank: int) -> Tensor:
    """Return a rank's tensor."""
    return torch.randint(100, (LENGTH,), generator=case.generator(rank)).double()


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer with this rank's tensor."""
    assert callable(answer)
    return answer(ctx, given(case, ctx.rank), case["a_node"])


def expected(case: Case) -> list[Tensor]:
    """Return the sum, for each rank."""
    return [torch.stack([given(case, rank) for rank in range(case.ranks)]).sum(0)] * case.ranks


def crossing(seen: Seen) -> float:
    """Return the bytes that the busiest rank sends in collectives and messages that leave its node."""
    return _most(seen, True)


def staying(seen: Seen) -> float:
    """Return the bytes that the busiest rank sends in those that stay in its node."""
    return _most(seen, False)


def _most(seen: Seen, leaving: bool) -> float:
    assert seen.trace is not None
    k = seen.case["a_node"]
    return max(
        sum(_bytes(rank, op) for op in _communication(rank) if _leaves(rank, number, op, k) == leaving)
        for number, rank in enumerate(seen.trace.ranks)
    )


def _communication(rank: Any) -> Any:
    return rank.ops[(rank.ops["lane"] == Lane.COMM) & (rank.ops["kind"] != Kind.BARRIER)]


def _members(rank: Any, op: Any) -> list[int]:
    return [int(each) for each in rank.name(int(op["group"])).split(",") if each]


def _leaves(rank: Any, number: int, op: Any, k: int) -> bool:
    """Return whether a collective or message has ranks of two nodes."""
    rooted = op["kind"] in (Kind.SEND, Kind.RECV)
    members = [number, int(op["peer"])] if rooted else _members(rank, op)
    return len({member // k for member in members}) > 1


def _bytes(rank: Any, op: Any) -> float:
    if op["kind"] == Kind.SEND:
        return float(op["bytes"])
    if op["kind"] == Kind.RECV:
        return 0.0
    return float(op["bytes"]) * wire_factor(int(op["kind"]), len(_members(rank, op)))


def between(case: Case) -> float:
    """Return the bytes that a rank may send between nodes."""
    k = case["a_node"]
    m = case.ranks // k
    return 2 * (m - 1) / m * LENGTH * 8 / k


def inside(case: Case) -> float:
    """Return the bytes that a rank may send inside of its node."""
    k = case["a_node"]
    return 2 * (k - 1) / k * LENGTH * 8


EXERCISE = OnRanks(
    solution=hierarchical_all_reduce,
    cases=(
        Case(4, 1, {"a_node": 2}),
        Case(6, 2, {"a_node": 3}),
        Case(6, 3, {"a_node": 2}),
    ),
    play=play,
    expected=expected,
    result="the sum",
    budgets=(
        Budget(BETWEEN, crossing, between, "bytes"),
        Budget(INSIDE, staying, inside, "bytes"),
    ),
    after="13-links-and-collectives",
    place=40,
    start="First the groups, on paper, for 6 ranks and k = 3: which ranks are a node, and which have the same "
    "part? Then "
    "make them all on every rank, and pick this rank's two.",
    mistakes=(
        Mistake(
            "makes-its-own-groups-only",
            (
                "The report says which groups the ranks make. Are they the same, in the same order?",
                "A group is made by all ranks together, members or not. If each rank makes only the two that it is a "
                "member of, the calls do not match.",
                "A loop over all nodes, and one over all places in a node; then pick `[ctx.rank // k]` and "
                "`[ctx.rank % k]`.",
            ),
            """
            def hierarchical_all_reduce(ctx: mk.Context, tensor: Tensor, k: int) -> Tensor:
                first = ctx.rank // k * k
                node = ctx.comm.group(range(first, first + k))
                others = ctx.comm.group(range(ctx.rank % k, ctx.world_size, k))
                return node.all_gather(others.all_reduce(node.reduce_scatter(tensor)))
            """,
            when=lambda seen: seen.mismatch or seen.hang,
        ),
        Mistake(
            "one-flat-all-reduce",
            (
                "The sum is right. How many bytes does each rank send to another node?",
                "All of it goes round one ring, which leaves a node and enters it again. First reduce inside of "
                "the node, so "
                "that each rank has a k-th left to send.",
            ),
            """
            def hierarchical_all_reduce(ctx: mk.Context, tensor: Tensor, k: int) -> Tensor:
                return ctx.comm.all_reduce(tensor)
            """,
            when=lambda seen: (
                seen.budget == BETWEEN
                and crossing(seen) >= 2 * (seen.case.ranks - 1) / seen.case.ranks * LENGTH * 8
                and not staying(seen)
            ),
        ),
        Mistake(
            "one-rank-for-the-node",
            (
                "The sum is right. Which rank sends what goes between nodes, and what do the others do meanwhile?",
                "One rank sends everything, through its one network card, while those of the others are idle. Let each "
                "rank of a node send a k-th.",
            ),
            [
                ("part = node.reduce_scatter(tensor)", "part = node.reduce(tensor, 0)"),
                (
                    "part = others.all_reduce(part)",
                    "part = others.all_reduce(part) if ctx.rank % k == 0 else part",
                ),
                ("return node.all_gather(part)", "return node.broadcast(part, 0)"),
            ],
            when=lambda seen: seen.budget and staying(seen) > inside(seen.case),
        ),
        Mistake(
            "nodes-and-others-swapped",
            (
                "Which ranks are in a node: 0, 1, 2, or 0, 2, 4?",
                "Ranks of a node are neighbours: jk to jk+k-1. With the two groups swapped the sum comes out, and the "
                "whole tensor goes over the network.",
            ),
            [
                (
                    "part = node.reduce_scatter(tensor)",
                    "node, others = others, node\n    part = node.reduce_scatter(tensor)",
                )
            ],
            when=lambda seen: seen.budget == BETWEEN and staying(seen) < inside(seen.case),
        ),
        Mistake(
            "everybody-sends-the-node-s-sum",
            (
                "The sum is right, and k times as much as necessary goes between nodes. What does each rank of "
                "a node send?",
                "After an all-reduce inside, all k ranks have the same sum, and all of them send it. With a "
                "reduce-scatter each has a k-th of it, and sends only that.",
            ),
            [
                ("part = node.reduce_scatter(tensor)", "part = node.all_reduce(tensor)"),
                ("return node.all_gather(part)", "return part"),
            ],
            when=lambda seen: (
                seen.budget == BETWEEN and crossing(seen) == seen.case["a_node"] * between(seen.case)
            ),
        ),
        Mistake(
            "never-leaves-the-node",
            (
                "Whose sum does each rank have in the end?",
                "That of its own node. Between the two phases inside, the k-ths of all nodes have to be summed.",
            ),
            [("    part = others.all_reduce(part)\n", "")],
        ),
        Mistake(
            "keeps-its-part",
            (
                "How long is what a rank returns?",
                "A k-th of the sum. The other ranks of the node have the rest: all-gather it.",
            ),
            [("return node.all_gather(part)", "return part")],
        ),
        Mistake(
            "gathers-before-it-sums",
            (
                "In which order do the phases come, and which bytes go between nodes?",
                "reduce-scatter inside, all-reduce between, all-gather inside. With the all-gather first, "
                "everybody has the "
                "whole again before it goes over the network, or sums it twice.",
            ),
            [
                (
                    "    part = others.all_reduce(part)\n    return node.all_gather(part)",
                    "    part = node.all_gather(part)\n    return ctx.comm.all_reduce(part)",
                ),
            ],
        ),
    ),
    otherwise=("Let 4 ranks hold 1, 10, 100 and 1000, and print `part` after each phase.",),
)

"""A hierarchical all-reduce."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks, call_with
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
    play=call_with(lambda case, rank: (given(case, rank), case["a_node"])),
    expected=expected,
    result="the sum",
    budgets=(
        Budget(BETWEEN, crossing, between, "bytes"),
        Budget(INSIDE, staying, inside, "bytes"),
    ),
    after="13-links-and-collectives",
    place=40,
    when={
        "makes-its-own-groups-only": lambda seen: seen.mismatch or seen.hang,
        "one-flat-all-reduce": lambda seen: (
            seen.budget == BETWEEN
            and crossing(seen) >= 2 * (seen.case.ranks - 1) / seen.case.ranks * LENGTH * 8
            and not staying(seen)
        ),
        "one-rank-for-the-node": lambda seen: seen.budget and staying(seen) > inside(seen.case),
        "nodes-and-others-swapped": lambda seen: seen.budget == BETWEEN and staying(seen) < inside(seen.case),
        "everybody-sends-the-node-s-sum": lambda seen: (
            seen.budget == BETWEEN and crossing(seen) == seen.case["a_node"] * between(seen.case)
        ),
    },
)

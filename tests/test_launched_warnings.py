"""What is said before a training starts on nodes that its plan does not suit; the nodes are described."""

from __future__ import annotations

import warnings

import pytest

import mpkit as mk
from mpkit.devices.placement_notes import TP_INSIDE
from mpkit.launch.session.launched_cluster import warn_of_nodes

NODES = ["node-a", "node-a", "node-b", "node-b"]


def test_tensor_parallelism_across_nodes_is_warned_of_in_the_words_of_the_advice() -> None:
    with pytest.warns(mk.errors.UnwisePlan) as said:
        warn_of_nodes(mk.Plan(tp=4), NODES, 0)
    assert str(said[0].message) == f"Plan(tp=4): {TP_INSIDE} Here a group of 4 spans 2 nodes of 2 devices."


@pytest.mark.parametrize(
    ("plan", "nodes", "rank"),
    [
        (mk.Plan(dp=2, tp=2), NODES, 0),  # each group is within a node
        (mk.Plan(tp=4), ["here"] * 4, 0),
        (mk.Plan(dp=4), NODES, 0),
        (mk.Plan(tp=4), NODES, 1),  # rank 0 has said it
    ],
)
def test_what_is_not_warned_of(plan: mk.Plan, nodes: list[str], rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_nodes(plan, nodes, rank)

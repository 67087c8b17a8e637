"""DeepSeek's balancer: the published example, what holds of any placement, and what it says of a run's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpkit as mk
from mpkit.prediction.experts.load_balancer import balance_experts
from mpkit.trace.expert_load import ExpertLoad
from mpkit.trace.files import RankTrace
from mpkit.trace.records import Kind
from tests.experts.test_expert_parallel import HOW, gpt, texts
from tests.serial import EXACT, Train, check_equal, same, serial

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

ORACLES = Path(__file__).parents[2].parent / "shared" / "data" / "frontier" / "oracles.json"

EXAMPLE: dict[str, Any] = {
    "weight": [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    "phy2log": [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ],
    "phy2log_global_policy": [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ],
    "gpu_loads": [
        [121.5, 86.5, 125.0, 113.0, 147.5, 131.5, 156.0, 152.0],
        [173.0, 179.5, 120.5, 172.0, 123.0, 152.0, 118.5, 117.5],
    ],
}
"""Of deepseek-ai/EPLB's README (16 slots, 4 groups, 2 nodes, 8 GPUs), and what its code gives without groups."""


def example_load() -> ExpertLoad:
    return ExpertLoad({f"block{i}": np.array([[w]], float) for i, w in enumerate(EXAMPLE["weight"])}, first=0)


def test_the_published_example() -> None:
    oracles = [EXAMPLE] + ([json.loads(ORACLES.read_text())["eplb"]] if ORACLES.exists() else [])
    for each in oracles:
        placed = balance_experts(each["weight"], 16, groups=4, nodes=2, gpus=8)
        assert placed.phy2log.tolist() == each["phy2log"]
        everywhere = balance_experts(each["weight"], 16, groups=1, nodes=2, gpus=8)
        assert everywhere.phy2log.tolist() == each["phy2log_global_policy"]
        assert [
            layer.load_after.tolist()
            for layer in example_load().balance(16, groups=4, nodes=2, gpus=8).layers
        ] == (each["gpu_loads"])


@pytest.mark.parametrize(("nodes", "gpus", "groups"), [(1, 2, 1), (1, 4, 8), (2, 4, 4), (4, 8, 8), (4, 8, 1)])
@pytest.mark.parametrize("further", [0, 8, 24])
def test_any_placement_has_all_experts_and_is_no_worse(
    nodes: int, gpus: int, groups: int, further: int
) -> None:
    for seed in range(6):
        rows = np.random.default_rng(seed).zipf(1.3 + seed / 4, (3, 16)).clip(0, 5000) - 1.0
        placed = balance_experts(rows, 16 + further, groups=groups, nodes=nodes, gpus=gpus)
        # ---- every expert has a slot, and every slot an expert; the mapping back says the same
        for phy2log, log2phy, logcnt in zip(placed.phy2log, placed.log2phy, placed.logcnt, strict=True):
            assert np.bincount(phy2log, minlength=16).tolist() == logcnt.tolist() and logcnt.min() >= 1
            slots = [s for expert in log2phy for s in expert if s >= 0]
            assert sorted(slots) == list(range(16 + further))
            assert all(phy2log[s] == expert for expert, of in enumerate(log2phy) for s in of if s >= 0)
            # ---- groups stay on a node
            if groups % nodes == 0:
                homes = [set(of // (16 // groups)) for of in phy2log.reshape(nodes, -1)]
                assert sum(map(len, homes)) == groups
        # ---- the busiest GPU is never busier than with experts as they were
        load = ExpertLoad({f"block{i}": each[None, None] for i, each in enumerate(rows)}, first=0)
        balance = load.balance(16 + further, groups=groups, nodes=nodes, gpus=gpus)
        for each in balance.layers:
            assert each.load_after.max() <= each.load_before.max() and each.load_after.shape == (gpus,)
            assert (
                each.load_after.sum()
                == pytest.approx(each.load_before.sum())
                == rows[int(each.name[-1])].sum()
            )
            assert each.copies.min() >= 1 and each.copies.sum() == 16 + further
        assert balance.time_ratio <= 1 and balance.moves <= 3 * (16 + further)


def test_a_balance_says_what_it_would_do() -> None:
    balance = example_load().balance(16, groups=4, nodes=2, gpus=8, expert_bytes=1e6)
    (before, after), *_ = balance.imbalance.values()
    assert (before, after) == pytest.approx((239 / 129.125, 156 / 129.125))
    assert balance.time_ratio == pytest.approx((156 + 179.5) / (239 + 344))
    first = balance.layers[0].phy2log
    moved = {(slot // 2, int(e)) for slot, e in enumerate(first) if e * 8 // 12 != slot // 2}
    assert balance.layers[0].moves == len(moved) and balance.moved_bytes == balance.moves * 1e6
    assert "hierarchical policy" in str(balance) and "0.58 x their time" in str(balance)
    assert "routers choose as in this step" in str(balance)
    assert balance.to_svg().count("<title>expert ") == 2 * (12 + 16)
    assert len(balance.to_dataframe()) == 2 * 16


def test_a_placement_is_judged_by_the_rows_of_another_step() -> None:
    rows = np.array([[9.0, 1.0, 1.0, 1.0], [8.0, 2.0, 1.0, 1.0], [1.0, 9.0, 1.0, 1.0]])
    load = ExpertLoad({"block0": rows[:, None]}, first=4)
    balance = load.balance(6, gpus=2, step=1, window=2)
    assert balance.layers[0].phy2log.tolist() == load.balance(6, gpus=2, step=0).layers[0].phy2log.tolist()
    assert (balance.step, balance.layers[0].rows.tolist()) == (5, rows[1].tolist())
    later = balance.apply_to(load)
    assert later.step == 6 and later.layers[0].load_after.tolist() == pytest.approx(
        [2 / 3 + 1, 1 / 3 + 9 + 1]
    )
    assert later.time_ratio > 1, "copies of the expert that was busy do not help the one that is"
    with pytest.raises(ValueError, match=r"4 experts of block0; the load has 2 of block0"):
        balance.apply_to(ExpertLoad({"block0": rows[:, None, :2]}, first=0))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"replicas": 13, "gpus": 4}, "replicas=16 would work"),
        ({"replicas": 8, "gpus": 4}, "replicas=12 would work"),
        ({"replicas": 16, "gpus": 4, "nodes": 3}, "gpus=6 would work"),
        ({"replicas": 16, "gpus": 4, "groups": 5}, "groups=1 would work"),
        ({"replicas": 16, "gpus": 4, "groups": 0}, "each of them is at least 1"),
        ({"replicas": 16, "gpus": 16}, "divided over 1 to 12 GPUs"),
        ({"replicas": 16, "gpus": 4, "step": 1}, "1 steps were counted, 0 to 0"),
        ({"replicas": 16, "gpus": 4, "window": 0}, "window=1 is one"),
    ],
)
def test_numbers_that_do_not_divide_are_rejected_with_ones_that_do(
    asked: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        example_load().balance(**asked)


def test_experts_move_between_two_steps_of_a_training(train: Train, tmp_path: Path) -> None:
    """Training stays equal to serial training, and the busiest rank of the next step computes fewer rows."""
    model, data = gpt(experts=8, top_k=2), texts(8, 8)
    how: dict[str, Any] = {**HOW, "checkpoint_every": 2, "checkpoint_dir": tmp_path}
    plan = mk.Plan(dp=4, ep=4)
    first = train(model, data, plan, **{**how, "steps": 2})
    kept = train(model, data, plan, **{**HOW, "steps": 4}, resume_from=tmp_path)
    balance = first.expert_load.balance(8, gpus=4)
    assert balance.moves > 0
    rest = train(
        mk.models.place_experts(model, balance.orders), data, mk.Plan(dp=4, ep=4, zero=1),
        **{**how, "steps": 4}, resume_from=tmp_path / "step-00000002",
    )  # fmt: skip
    # ---- equal to serial training
    expected, weights = serial(model, data, **{**HOW, "steps": 4})
    assert [*first.losses, *rest.losses] == pytest.approx(expected, rel=EXACT["rtol"])
    same(rest, expected[2:], weights, **EXACT)
    # ---- the rows that each rank computed in the next step: predicted, and those that it sent back
    predicted = balance.apply_to(kept.expert_load, 0).layers
    for run, loads in (
        (kept, [each.load_before for each in predicted]),
        (rest, [each.load_after for each in predicted]),
    ):
        returned = [returned_rows(rank, step=2, layers=2, row_bytes=12 * 8) for rank in run.trace.ranks]
        assert np.transpose(returned).tolist() == [each.tolist() for each in loads]
        matrices = [run.token_routes(each.name, 0).matrix for each in balance.layers]
        assert [each.sum(axis=0).tolist() for each in matrices] == [each.tolist() for each in loads]
    assert balance.apply_to(kept.expert_load, 0).time_ratio < 1
    # ---- another balance begins where experts are now
    again = rest.expert_load.balance(8, gpus=4, step=0)
    assert [each.load_before.tolist() for each in again.layers] == [
        each.load_after.tolist() for each in predicted
    ]


def returned_rows(rank: RankTrace, step: int, layers: int, row_bytes: int) -> list[float]:
    """Return by layer what a rank sent in the third all-to-all of each forward: after counts and dispatch, results."""
    ops = rank.ops[(rank.ops["kind"] == Kind.ALL_TO_ALL) & (rank.ops["step"] == step)]
    returned: list[float] = (ops["bytes"][: 3 * layers].reshape(layers, 3)[:, 2] / row_bytes).tolist()
    return returned


@pytest.mark.parametrize(
    "plan",
    [
        mk.Plan(dp=4, zero=3, dp_shard=2, ep=2),
        mk.Plan(pp=2, dp=2, schedule="zbv", virtual_stages=2, microbatches=4, ep=2),
    ],
    ids=repr,
)
def test_experts_in_any_order_equal_serial_training(train: Train, plan: mk.Plan) -> None:
    orders = {"block0.mlp.experts": [2, 0, 3, 1], "block1.mlp.experts": [1, 2, 3, 0]}
    data = texts(7, 7)
    limits = {} if plan.pp > 1 else {"bias_rate": 0.01}
    run = check_equal(train, mk.models.place_experts(gpt(**limits), orders), data, plan, **HOW)
    owners = run.token_routes("block0").owners[0]
    first, *_ = np.flatnonzero(np.array(owners) == owners[2]).tolist()
    assert [owners[expert] for expert in orders["block0.mlp.experts"]] == sorted(owners) and first in (0, 2)

"""An axis is one row and one strategy file: with them it trains, and is drawn, counted and predicted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpkit as mk
from examples.own_axis import CLASSES, divide_classes
from mpkit.strategies.stage.shard import Shard
from mpkit.views.placement.svg import placement_svg


def head_of(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5)
    )


def batches(steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 4).double(), torch.randint(5, (8,))) for _ in range(steps)]


def train(cluster: mk.Cluster, plan: mk.Plan, **options: Any) -> mk.Run:
    torch.manual_seed(0)
    options = {"max_grad_norm": 0.5} | options
    return cluster.resized(plan.ranks).train(
        head_of().double(), batches(), plan, loss=nn.functional.cross_entropy, steps=3, verify="all",
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1), **options,
    ).wait()  # fmt: skip


@pytest.mark.parametrize(
    "plan",
    [
        mk.Plan(axes={CLASSES: 2}),
        mk.Plan(axes={CLASSES: 2}, dp=2, zero=3),
        mk.Plan(axes={CLASSES: 3}, pp=2, schedule="1f1b", microbatches=4),
        mk.Plan(axes={CLASSES: 2}, dp=2, zero=1, recompute="full", microbatches=2),
        mk.Plan(axes={CLASSES: 2}, tp=2),
    ],
    ids=["alone", "ZeRO-3", "a pipeline", "ZeRO-1", "tensor parallelism"],
)
def test_it_equals_serial_training(cluster: mk.Cluster, plan: mk.Plan) -> None:
    run = train(cluster, plan)
    assert str(run.proof).startswith("equal to serial training in steps 1 to 3"), run.proof
    serial = train(cluster, mk.Plan.serial())
    for name, value in serial.state_dict().items():
        torch.testing.assert_close(run.state_dict()[name], value, rtol=1e-8, atol=1e-8)


def test_it_is_counted_and_drawn(cluster: mk.Cluster) -> None:
    run = train(cluster, mk.Plan(axes={CLASSES: 2}, dp=2, microbatches=2), max_grad_norm=None)
    volume = run.timeline().comm_volume()
    rows = {(row.axis, row.kind): row for row in volume.rows}
    assert {axis for axis, _ in rows} == {"classes", "dp"}
    assert [row.ratio for row in rows.values()] == pytest.approx([1.0] * 3), str(volume)
    assert CLASSES.ink in volume._repr_html_()
    assert CLASSES.ink in placement_svg(run.placement())
    assert "what classes divides\n  *  3 or 2 of 5 rows" in str(run.placement())
    assert run.timeline().comm_matrix().places[1] == "dp0 classes1"
    assert run.plan.describe().endswith("2 ranks divide the classes of the head; each its rows of the head.")


def test_it_is_predicted() -> None:
    batch = torch.randn(8, 64), torch.randint(10, (8,))
    train = {"loss": nn.functional.cross_entropy, "optimizer": torch.optim.SGD}

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1024))

    whole, divided = (
        mk.Timeline.of(mk.trace_fake(model, plan, batch=batch, hardware="8x-a100-nvlink", **train))
        for plan in (mk.Plan(), mk.Plan(axes={CLASSES: 4}))
    )
    assert sum(divided.peak_memory[0].values()) < 0.6 * sum(whole.peak_memory[0].values())
    rows = divided.comm_volume().rows
    assert [(row.axis, row.ratio) for row in rows] == [("classes", pytest.approx(1.0))] * 2
    with pytest.raises(ValueError, match=r"mk\.trace_fake"):
        mk.estimate("llama3-8b", mk.Plan(axes={CLASSES: 2}), "8x-h100-nvlink", global_batch=8, sequence=1024)


def test_a_training_goes_on_under_another_plan(cluster: mk.Cluster, tmp_path: Path) -> None:
    train(cluster, mk.Plan(axes={CLASSES: 2}), checkpoint_dir=tmp_path, checkpoint_every=2)
    resumed = train(cluster, mk.Plan(dp=2, zero=2), resume_from=tmp_path)
    whole = train(cluster, mk.Plan.serial())
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-8, atol=1e-8)


def forgets_its_bias(model: nn.Module, group: object) -> dict[str, Shard]:
    found = dict(divide_classes(model, group))  # type: ignore[arg-type]
    found.pop("4.bias")
    return found


def has_the_first_rows(model: nn.Module, group: object) -> dict[str, Shard]:
    head = model[4]  # type: ignore[index]
    shard = Shard((5, 8), 0, (range(3),))
    head.weight = nn.Parameter(shard.take(head.weight.detach()))
    return {"4.weight": shard}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"divide": forgets_its_bias}, "a Shard for each parameter that it divides"),
        ({"divide": has_the_first_rows}, r"hold \[0, 0, 1, 1, 2, 2\] of the 5 rows of 4.weight"),
        ({"divide": None}, "has no strategy"),
        ({"name": "tp"}, "is taken"),
    ],
)
def test_what_cannot_work_is_rejected(cluster: mk.Cluster, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        train(cluster, mk.Plan(axes={dataclasses.replace(CLASSES, **changes): 2}))


def test_a_file_keeps_what_is_drawn() -> None:
    plan = mk.Plan(axes={CLASSES: 2}, dp=2)
    again = mk.Plan.from_json(plan.to_json())
    assert again.mesh.groups("classes") == plan.mesh.groups("classes") == [(0, 1), (2, 3)]
    assert again.mesh.row("classes").ink == CLASSES.ink

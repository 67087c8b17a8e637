"""hpZ: ZeRO-3 with secondary shards within groups, from which all gathers of a step but the first are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.plan.hybrid import change_plan
from mpkit.plan.words import describe
from mpkit.prediction.advice.offers import missing_feature
from mpkit.prediction.cost_model.layout import layout_of
from mpkit.timeline.traffic import flows
from mpkit.trace import Kind
from tests.experts.test_expert_parallel import HOW, gpt, texts
from tests.recipes import adamw
from tests.serial import EXACT, Train, check_equal, same, serial
from tests.zero.test_hybrid import batch, chain

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        (mk.Plan(dp=4, zero=3, dp_secondary=2, microbatches=2, recompute="full"), {}),
        (mk.Plan(dp=2, cp=2, tp=2, zero=3, dp_secondary=1, prefetch=0), {"heads": 2, "experts": 0}),
        (mk.Plan(dp=4, zero=3, dp_secondary=2, ep=2, precision="full"), {"aux_loss": 0.1}),
        (
            mk.Plan(pp=2, dp=4, zero=3, dp_secondary=2, schedule="zbv", virtual_stages=2, microbatches=4),
            {"experts": 0},
        ),
    ],
    ids=str,
)
def test_training_equals_serial_training(train: Train, plan: mk.Plan, sizes: dict[str, Any]) -> None:
    run = check_equal(train, gpt(**sizes), texts(7, 7), plan, **HOW)
    assert run.proof is not None and str(run.proof).startswith("equal to serial training")


def test_an_evaluation_an_average_and_a_checkpoint_see_the_updated_weights(
    train: Train, tmp_path: Any
) -> None:
    plan = mk.Plan(dp=4, zero=3, dp_secondary=2)
    how = {**HOW, "evaluate": texts(3, 1), "every": 1, "ema": 0.8}
    one, two = (train(gpt(), texts(6, 5), each, **how) for each in (mk.Plan.serial(), plan))
    scores = [[run.metrics["eval loss"][step] for step in range(3)] for run in (one, two)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-8)
    torch.testing.assert_close(one.ema_state_dict(), two.ema_state_dict(), **EXACT)
    train(gpt(), texts(6, 6), plan, **HOW, checkpoint_every=3, checkpoint_dir=tmp_path)
    run = train(gpt(), texts(6, 6), plan, **{**HOW, "steps": 5}, resume_from=tmp_path)
    losses, weights = serial(gpt(), texts(6, 6), **{**HOW, "steps": 5})
    same(run, losses[3:], weights, **EXACT)


@pytest.mark.parametrize("m", [1, 2])
def test_only_the_first_gathers_are_among_all_replicas(train: Train, m: int) -> None:
    """A step sends psi (n-1)/n among all, and (2 m - 1) psi (s-1)/s within groups; a rank holds psi/n + psi/s."""
    plan, psi = mk.Plan(dp=4, zero=3, dp_secondary=2, microbatches=m), 4 * (64 + 8)
    run = train(chain(), batch(), plan, loss=F.mse_loss, optimizer=adamw, steps=3)
    timeline = run.timeline()
    rows = {(row.axis, row.kind): row for row in timeline.comm_volume().rows}
    gathered, again = rows["dp", "all_gather"], rows["dp_secondary", "all_gather"]
    assert (gathered.wire, again.wire) == (8 * psi * 3 / 4, (2 * m - 1) * 8 * psi / 2)
    assert gathered.ratio == again.ratio == rows["dp", "reduce_scatter"].ratio == 1.0
    assert {held["params"] for held in timeline.peak_memory} == {8 * psi / 4 + 8 * psi / 2}
    spans = timeline.spans[(timeline.spans["step"] == 2) & (timeline.spans["rank"] == 3)]
    gathers = np.sort(spans[spans["kind"] == Kind.ALL_GATHER], order="issued")
    groups = [timeline.names[group] for group in gathers["group"]]
    assert groups == ["0,1,2,3"] * 4 + ["2,3"] * (4 * (2 * m - 1)), (
        "every layer among all, once; then neighbours"
    )


def test_gathers_cross_between_nodes_once(train: Train) -> None:
    """Nodes of two: gathers of ZeRO-3 cross twice, with secondary shards once; and so does each reduce-scatter."""
    crossing = []
    for secondary in (None, 2):
        plan = mk.Plan(dp=4, zero=3, dp_secondary=secondary)
        run = train(chain(), batch(), plan, loss=F.mse_loss, optimizer=adamw, steps=2)
        to = [(flow, to) for flow in flows(run.timeline()) for to in flow.to if flow.rank // 2 != to // 2]
        crossing.append(sum(flow.to[rank] for flow, rank in to))
    once = 2 * 8 * 288 * 3 / 4  # the two ranks whose neighbour in the ring is on the other node
    assert crossing == [3 * once, 2 * once]


def test_the_secondary_copy_is_predicted() -> None:
    """Memory: psi/s more parameters. Time: less where links between nodes are slow."""
    machine = mk.hardware("h100", nodes=4, nic="100gbe")
    how: dict[str, Any] = {"global_batch": 32, "sequence": 4096}
    plain = mk.estimate("llama3-8b", mk.Plan(dp=32, zero=3, precision="bf16"), machine, **how)
    hpz = mk.estimate("llama3-8b", mk.Plan(dp=32, zero=3, dp_secondary=8, precision="bf16"), machine, **how)
    more = hpz.memory[0]["params"] - plain.memory[0]["params"]
    assert more == pytest.approx(2 * 8.03e9 / 8, rel=1e-3)
    assert hpz.step_time < 0.9 * plain.step_time
    layout = layout_of(mk.Plan(dp=32, zero=3, dp_secondary=8), 32)
    assert missing_feature("torchtitan", layout).startswith("torchtitan has no secondary shards")
    assert not missing_feature("deepspeed", layout)


@pytest.mark.parametrize(
    ("plan", "says", "works"),
    [
        ({"zero": 2}, "zero=2 gathers none there", {}),
        ({"dp_secondary": 3}, "several groups of dp_secondary=3", {}),
        ({"dp_secondary": 4}, "several groups of dp_secondary=4", {}),
        ({"dp_shard": 2}, "stay inside already", {}),
        ({"offload": "params"}, "on the host", {"offload": "optimizer"}),
    ],
)  # fmt: skip
def test_plans_that_cannot_be(plan: dict[str, Any], says: str, works: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        mk.Plan(**{"dp": 4, "zero": 3, "dp_secondary": 2, **plan})
    assert repr(mk.Plan(dp=4, zero=3, dp_secondary=2, **works)) in str(caught.value)


def test_the_plan_is_written_read_and_changed() -> None:
    plan = mk.Plan(dp=16, zero=3, dp_secondary=8)
    written = plan.to("deepspeed", global_batch=32, micro_batch=2)
    assert '"zero_hpz_partition_size": 8' in str(written) and mk.Plan.read(str(written)) == plan
    assert mk.Plan.from_json(plan.to_json()) == plan
    off = str(written).replace('"zero_hpz_partition_size": 8', '"zero_hpz_partition_size": 1')
    assert mk.Plan.read(off) == mk.Plan(dp=16, zero=3)
    assert change_plan(plan, dp=8).dp_secondary is None and change_plan(plan, dp=32).dp_secondary == 8
    assert change_plan(plan, zero=1) == mk.Plan(dp=16, zero=1)
    with pytest.raises(TypeError, match="dp_secondary= is the number of replicas"):
        mk.Plan(dp=16, zero=3, zero_hpz_partition_size=8)  # type: ignore[call-arg]
    talks = {talk.axis: talk for talk in plan.placement(hardware="2x8-h100-ndr").talks}
    assert talks["dp"].crosses and not talks["dp_secondary"].crosses
    assert talks["dp_secondary"].groups == (tuple(range(8)), tuple(range(8, 16)))
    assert "from secondary shards within groups of 8" in describe(plan)


def test_it_trains_a_gpt_in_16_bits(train: Train) -> None:
    """The secondary shard is in 16 bits, as what is gathered is."""
    torch.manual_seed(0)
    model = GPT(vocab=33, layers=2, width=12, heads=3, length=8)
    runs = [
        train(model, texts(8), mk.Plan(dp=4, zero=3, precision="bf16", dp_secondary=secondary),
              loss=next_token_loss, optimizer=adamw, steps=3)
        for secondary in (None, 2)
    ]  # fmt: skip
    assert runs[0].losses == runs[1].losses


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_collectives_are_named_by_their_layer(train: Train, zero: int) -> None:
    """So a search for "layer 1" finds them; what is sent for several layers together has no name."""
    plan = mk.Plan(dp=2, zero=zero, bucket_mb=0.001)
    run = train(gpt(experts=0), texts(2, 2), plan, **{**HOW, "steps": 1})
    timeline = run.timeline()
    named: dict[Kind, set[str]] = {Kind.ALL_GATHER: set(), Kind.REDUCE_SCATTER: set()}
    for span in timeline.spans[timeline.spans["rank"] == 0]:
        if span["kind"] in named:
            named[Kind(span["kind"])].add(timeline.names[span["name"]])
    for kind, names in named.items():
        assert {name.split(".")[0] for name in names} >= {"layer block0", "layer block1"}, (kind, names)

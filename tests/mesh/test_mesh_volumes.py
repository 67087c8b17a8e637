"""What real trainings send, against the papers: to the byte, along every axis.

Shoeybi et al. 2019, section 3: a transformer layer makes 2 all-reduces of b s h elements forward and 2 backward, which
is 8 b s h (t-1)/t elements on the wire. Korthikanti et al. 2022, section 4.2.2: with sequence parallelism as many, as
reduce-scatters and all-gathers. Rajbhandari et al. 2020, section 7: 2 psi among replicas, 3 psi under ZeRO-3. Liu et
al. 2023: keys and values round the ring.
"""

from typing import Any

import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.plan.mesh import join_axes
from tests.mesh.test_mesh_training import gpt2, llama, tokens, words
from tests.recipes import logits_loss, sgd
from tests.serial import Train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan"),
    pytest.mark.filterwarnings("ignore:.*_token_id.*"),
]

B, S, H, HEADS, VOCAB = 8, 16, 16, 4, 32
FP32 = 4


def gpt(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab=VOCAB, layers=layers, width=H, heads=HEADS, length=S)


def trained(train: Train, plan: mk.Plan, layers: int = 4) -> mk.Timeline:
    data, how = tokens(B, S, VOCAB), {"loss": next_token_loss, "optimizer": sgd, "steps": 2}
    return train(gpt(layers), data, plan, **how).timeline()


def wire(timeline: mk.Timeline, axis: str, kind: str) -> float:
    """Bytes on the wire of a rank in a step."""
    return sum(row.wire for row in timeline.comm_volume().rows if (row.axis, row.kind) == (axis, kind))


def check_ratios(timeline: mk.Timeline, axes: set[str], unknown: set[tuple[str, str]] = frozenset()) -> None:  # type: ignore[assignment]
    """All rows have a formula, which is what was sent; but for the loss, a float on its way to the first stage."""
    rows = timeline.comm_volume().rows
    assert {row.axis for row in rows} == axes
    for row in rows:
        if row.expected is None:
            assert (row.axis, row.kind) in unknown, row
            continue
        loss = FP32 if (row.axis, row.kind) == ("pp", "send") else 0
        assert row.expected <= row.wire + 1e-6 and row.wire - loss <= row.expected + 1e-6, row
        assert row.ratio == pytest.approx(1.0, abs=0.01)


PLANS: list[dict[str, Any]] = [
    {"cp": 3, "cp_method": "ulysses", "microbatches": 3, "recompute": "full"},
    {"dp": 4, "zero": 3, "dp_shard": 2, "microbatches": 2},
    {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2, "microbatches": 2},
    {"pp": 2, "dp": 2, "tp": 2, "schedule": "1f1b", "zero": 1, "sequence_parallel": True, "microbatches": 4},
]


@pytest.mark.parametrize("how", PLANS, ids=words)
def test_what_is_sent_is_what_the_formulas_say(train: Train, how: dict[str, Any]) -> None:
    """Also where heads, vocabulary and micro-batches are not divided evenly, on average."""
    torch.manual_seed(0)
    plan = mk.Plan(**how)
    model = GPT(vocab=33, layers=plan.stages + 1, width=12, heads=3, length=12)
    run = train(model, tokens(7, 12, 33), plan, loss=next_token_loss, optimizer=sgd, steps=2)
    assert plan.cp == 1 or run.attention_work.by_rank == [2 * 7 * (12 * 13 // 2)] * 3  # one head each
    degrees = {axis for axis in plan.mesh.axes if getattr(plan.mesh, axis) > 1}
    shards = join_axes(axis for axis in plan.mesh.parts("dp_shard", "cp") if axis in degrees)
    axes = degrees - {"dp", "dp_shard"} | {shards} - {""}
    check_ratios(run.timeline(), axes)
    assert set(run.timeline().comm_matrix().axes) == axes
    placed = run.placement(hardware="8x-h100-nvlink")
    assert {talk.axis for talk in placed.talks} == degrees
    assert placed.stages == tuple(map(tuple, run.trace.meta["stages"]))


def test_a_model_of_transformers_sends_it_too(train: Train) -> None:
    """With tied weights, whose stages send gradients and weights, and whose gradients replicas reduce once a step."""
    torch.manual_seed(3)
    plan = mk.Plan(pp=2, schedule="1f1b", microbatches=2, dp=2, zero=2)
    data = [({"input_ids": x}, y) for x, y in tokens(8, 8, 33)]
    run = train(gpt2(), data, plan, loss=logits_loss, optimizer=sgd, steps=2)
    check_ratios(run.timeline(), {"pp", "dp"})


def test_ulysses_sends_a_head_of_keys_to_all_that_need_it(train: Train) -> None:
    """Which the formula counts: two ranks share one head of keys."""
    data = [({"input_ids": x}, y) for x, y in tokens(6, 8, 33)]
    plan = mk.Plan(cp=2, cp_method="ulysses")
    run = train(llama(key_heads=1), data, plan, loss=logits_loss, optimizer=sgd, steps=2)
    check_ratios(run.timeline(), {"cp"})


def test_the_loss_of_divided_logits_all_reduces_three_numbers_per_token(train: Train) -> None:
    """The largest logit, the target's and the sum of exp (Shoeybi et al. 2019, section 3): 3 b s elements per step.

    A model with L layers adds 4 L b s h, and its embedding and its head b s h each.
    """
    layers, t = 2, 4
    payload = ((4 * layers + 2) * B * S * H + 3 * B * S) * FP32
    timeline = trained(train, mk.Plan(tp=t, microbatches=2), layers)
    assert wire(timeline, "tp", "all_reduce") == payload * 2 * (t - 1) / t
    assert "8 b s h (t-1)/t a layer" in str(timeline.comm_volume())
    check_ratios(timeline, {"tp"})

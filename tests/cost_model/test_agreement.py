"""One cost model: replays, plays and estimates say the same of small models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.prediction.cost_model.communication import Network
from mpkit.prediction.dry_run.memory import held_at_peak
from mpkit.trace import Kind
from tests.recipes import adamw

BATCH, LENGTH = 32, 512
PLANS = [
    (mk.Plan.zero(3, 4), 0.02),
    (mk.Plan(tp=4), 0.03),
    (mk.Plan(pp=2, schedule="1f1b", microbatches=4), 0.02),
]
MORE = [
    (mk.Plan.serial(), 0.02),
    (mk.Plan(recompute="full"), 0.02),
    (mk.Plan.ddp(4), 0.02),
    (mk.Plan.zero(1, 4), 0.02),
    (mk.Plan.zero(2, 4), 0.02),
    (mk.Plan(tp=4, sequence_parallel=True), 0.03),
    (mk.Plan(cp=4), 0.02),
    (mk.Plan.gpipe(4, 8), 0.02),
    (mk.Plan(pp=4, schedule="1f1b", microbatches=8), 0.02),
    (mk.Plan(dp=2, tp=2), 0.05),
    (mk.Plan(pp=2, dp=2, schedule="1f1b", microbatches=4), 0.02),
]


def gpt() -> torch.nn.Module:
    return GPT(layers=4, width=1024, heads=16, vocab=8192, length=LENGTH)


@pytest.mark.parametrize(
    ("plan", "off"), [*PLANS, *(pytest.param(*each, marks=pytest.mark.soak) for each in MORE)], ids=repr
)
def test_a_play_takes_what_the_estimate_says(
    clusters: Callable[[int], mk.Cluster], plan: mk.Plan, off: float
) -> None:
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    trace = mk.trace_fake(
        gpt, plan, batch=(tokens, tokens), loss=next_token_loss, optimizer=adamw, hardware="8x-a100-nvlink",
        cluster=clusters(1), steps=2,
    )  # fmt: skip
    timeline = mk.Timeline.of(trace)
    played = timeline.step(timeline.steps[-1]).step_time
    said = mk.estimate(
        gpt(), plan, "8x-a100-nvlink", global_batch=BATCH, sequence=LENGTH, stack="mpkit"
    ).step_time
    assert said == pytest.approx(played, rel=off)


@given(
    kind=st.sampled_from([Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL]),
    nbytes=st.floats(1, 1e10),
    inside=st.sampled_from([1, 2, 4, 8]),
    nodes=st.integers(1, 4),
    name=st.sampled_from(["4x8-h100-ndr", "4x8-b200-efa", "8x-a100-nvlink", "8x-h100-pcie"]),
)
def test_a_replay_takes_as_long_for_a_collective_as_an_estimate(
    kind: Kind, nbytes: float, inside: int, nodes: int, name: str
) -> None:
    machine = mk.hardware(name)
    nodes = min(nodes, machine.nodes)
    ranks = [node * machine.per_node + place for node in range(nodes) for place in range(inside)]
    assert machine.time(kind, nbytes, ranks) == Network(machine).time(kind, nbytes, len(ranks), inside)


@pytest.mark.parametrize(
    "plan",
    [
        mk.Plan(pp=3, schedule="1f1b", microbatches=4),
        *(
            pytest.param(
                mk.Plan(pp=2, schedule=name, microbatches=4, virtual_stages=v), marks=pytest.mark.soak
            )
            for name, v in (("gpipe", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zbv", 2))
        ),
    ],
    ids=repr,
)
def test_stages_beside_a_large_head_are_those_of_a_run(
    clusters: Callable[[int], mk.Cluster], plan: mk.Plan
) -> None:
    """The head costs as much as five layers."""

    def model() -> torch.nn.Module:
        return GPT(layers=6, width=1024, heads=16, vocab=65_536, length=LENGTH)

    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    trace = mk.trace_fake(
        model, plan, batch=(tokens, tokens), loss=next_token_loss, optimizer=adamw, hardware="8x-a100-nvlink",
        cluster=clusters(1), steps=2,
    )  # fmt: skip
    timeline = mk.Timeline.of(trace)
    played = timeline.step(timeline.steps[-1]).step_time
    asked = {"global_batch": BATCH, "sequence": LENGTH}
    assert mk.estimate(model(), plan, "8x-a100-nvlink", **asked, stack="mpkit").step_time == pytest.approx(
        played, rel=0.05
    )
    equal = mk.estimate(model(), plan, "8x-a100-nvlink", **asked, stack="pytorch-fp32").layout
    assert sum(equal.stage_layers(6)) == 6 and max(equal.stage_layers(6)) == -(-6 // plan.pp)


@pytest.mark.parametrize(
    "plan",
    [
        mk.Plan(cp=4, cp_order="zigzag"),
        *(
            pytest.param(plan, marks=pytest.mark.soak)
            for plan in (
                mk.Plan.serial(),
                mk.Plan(cp=4),
                mk.Plan(cp=4, cp_method="ulysses"),
                mk.Plan(cp=4, cp_order="balanced"),
                mk.Plan(cp=4, cp_order="documents"),
            )
        ),
    ],
    ids=repr,
)
def test_attention_to_long_sequences_takes_what_the_estimate_says(
    clusters: Callable[[int], mk.Cluster], plan: mk.Plan
) -> None:
    """Causal attention is a quarter of the step: a fused kernel leaves out half of it, in a ring too."""

    def model() -> torch.nn.Module:
        return GPT(layers=2, width=1024, heads=16, vocab=8192, length=4096)

    tokens = torch.empty(4, 4096, dtype=torch.long, device="meta")
    trace = mk.trace_fake(
        model, plan, batch=(tokens, tokens), loss=next_token_loss, optimizer=adamw, hardware="8x-a100-nvlink",
        cluster=clusters(1),
    )  # fmt: skip
    said = mk.estimate(model(), plan, "8x-a100-nvlink", global_batch=4, sequence=4096, stack="mpkit")
    assert said.step_time == pytest.approx(mk.Timeline.of(trace).step_time, rel=0.04)
    of_one = "attention is that of one document per sequence" in str(said)
    assert of_one == (plan.cp_order in ("documents", "balanced"))


GRID = [
    mk.Plan(dp=4, tp=tp, zero=zero, microbatches=m, recompute=recompute)
    for tp, recompute, m, zero in product((1, 2), ("none", "full"), (1, 4), (0, 1, 2, 3))
]
QUICK = [GRID[1], GRID[3], GRID[9], GRID[14], GRID[16]]


@pytest.mark.parametrize(
    "plan",
    [*QUICK, *(pytest.param(each, marks=pytest.mark.soak) for each in GRID if each not in QUICK)],
    ids=repr,
)
def test_the_peak_of_memory_is_that_of_a_run(clusters: Callable[[int], mk.Cluster], plan: mk.Plan) -> None:
    """Under ZeRO with one micro-batch, gradients are made as activations go: no moment has all of both."""
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    trace = mk.trace_fake(
        gpt, plan, batch=(tokens, tokens), loss=next_token_loss, optimizer=adamw, hardware="8x-a100-nvlink",
        cluster=clusters(1), steps=2,
    )  # fmt: skip
    said = mk.estimate(gpt(), plan, "8x-a100-nvlink", global_batch=BATCH, sequence=LENGTH, stack="mpkit")
    predicted = said.stage_memory[0]
    peak = sum(held_at_peak(trace.ranks[0]).values())
    assert sum(predicted.values()) - predicted["context"] == pytest.approx(peak, rel=0.05)

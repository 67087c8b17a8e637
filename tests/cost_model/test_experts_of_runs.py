"""An estimate of experts beside tensor parallelism says what a run holds and sends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.prediction.cost_model.known_models import architecture_of
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.shares import ParameterShares, model_under
from mpkit.prediction.cost_model.stack import STACKS, stack_of
from mpkit.prediction.dry_run.memory import held_at_peak
from mpkit.timeline.traffic import flows
from tests.recipes import adamw

BATCH, LENGTH, SHARED = 16, 256, 1


def gpt() -> torch.nn.Module:
    return GPT(
        layers=2, width=256, heads=8, vocab=512, length=LENGTH, experts=8, top_k=2, shared_experts=SHARED
    )


def meshes() -> list[mk.Plan]:
    found = []
    for sequence_parallel, ep, zero in product((False, True), (1, 2, 4), (0, 1, 3)):
        for etp in [None, 2, 1][: 1 if ep == 1 else 3 if sequence_parallel else 2]:
            found.append(mk.Plan(dp=4, tp=2, ep=ep, etp=etp, zero=zero, sequence_parallel=sequence_parallel))
    return found


QUICK = [
    mk.Plan(dp=4, tp=2),
    mk.Plan(dp=4, tp=2, sequence_parallel=True),
    mk.Plan(dp=4, tp=2, ep=2, etp=2, zero=3, sequence_parallel=True),
    mk.Plan(dp=4, tp=2, ep=4, etp=1, zero=1, sequence_parallel=True),
]
REST = [pytest.param(plan, marks=pytest.mark.soak) for plan in meshes() if plan not in QUICK]


@pytest.mark.parametrize("plan", [*QUICK, *REST], ids=repr)
def test_experts_beside_tensor_parallelism_are_those_of_a_run(
    clusters: Callable[[int], mk.Cluster], plan: mk.Plan
) -> None:
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    trace = mk.trace_fake(
        gpt, plan, batch=(tokens, tokens), loss=next_token_loss, optimizer=adamw, hardware="8x-a100-nvlink",
        cluster=clusters(1), steps=3,
    )  # fmt: skip
    asked = {"global_batch": BATCH, "sequence": LENGTH, "stack": "mpkit"}
    said = mk.estimate(gpt(), plan, "8x-a100-nvlink", **asked)
    # ---- memory
    held, predicted = held_at_peak(trace.ranks[0]), said.stage_memory[0]
    assert predicted["params"] == pytest.approx(held["params"], rel=1e-3)
    assert predicted["optimizer"] == pytest.approx(held["optimizer"], rel=1e-3)
    if (
        not plan.zero
    ):  # which makes gradients as it goes: of two layers, the peak is before they are all there
        assert sum(predicted.values()) - predicted["context"] == pytest.approx(sum(held.values()), rel=0.12)
    # ---- bytes
    sent = {
        ("dp", "all_reduce"): 0.0,
        ("edp", "all_reduce"): 0.0,
        ("tp", "all_reduce"): 0.0,
        ("ep", "all_to_all"): 0.0,
    }
    for flow in flows(mk.Timeline.of(trace)):
        if flow.rank == 0 and (flow.axis, flow.kind.word) in sent:
            sent[flow.axis, flow.kind.word] += flow.payload
    shares, layout, own = said.shares, said.layout, said.shares.own if plan.ep > 1 else 0.0
    if not plan.zero:
        replicated = own if layout.expert_shards > 1 else 0.0
        both = sent["dp", "all_reduce"] + sent["edp", "all_reduce"]  # these can be the same ranks
        assert both == pytest.approx(4 * (shares.parameters - own + replicated), rel=1e-3)
    visits = BATCH // plan.dp * LENGTH * 2 // (plan.tp if plan.sequence_parallel and plan.etp != 2 else 1)
    routed = 4 * visits * 256 * 2 * 4  # two layers; there and back, forward and backward
    assert sent["ep", "all_to_all"] == pytest.approx(routed if plan.ep > 1 else 0.0, rel=1e-3)
    if layout.summed_experts:
        assert sent["tp", "all_reduce"] > 4 * shares.own / (layout.expert_shards if plan.zero else 1)


def test_each_stack_divides_experts_as_its_framework_does() -> None:
    """Megatron's and torchtitan's tensor parallelism divides experts, of any model; transformers' not GPT-OSS's."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_local_experts": 8}
    sizes |= {"num_experts_per_tok": 2, "intermediate_size": 512, "vocab_size": 512}
    model = architecture_of({"model_type": "gpt_oss", **sizes})
    assert not architecture_of(gpt()).whole_experts and not architecture_of("mixtral-8x7b").whole_experts
    divided = {name for name in STACKS if not model_under(stack_of(name), model).whole_experts}
    assert divided == {"megatron", "torchtitan", "torchtitan-compile"}
    asked = {"global_batch": BATCH, "sequence": LENGTH}
    plan = mk.Plan(tp=2, precision="bf16")
    own = {
        name: mk.estimate(model, plan, "8x-a100-nvlink", **asked, stack=name).shares.own
        for name in ("mpkit", "pytorch", "megatron", "torchtitan")
    }
    whole = 2 * model.expert_parameters()
    assert own == {"mpkit": whole, "pytorch": whole, "megatron": whole / 2, "torchtitan": whole / 2}


def test_a_token_that_visits_one_expert_is_sent_to_it() -> None:
    model = {"layers": 4, "hidden": 512, "heads": 8, "vocabulary": 1000, "experts": 4, "top_k": 1}
    found = mk.estimate(model, mk.Plan(dp=4, ep=4), "8x-a100-nvlink", global_batch=32, sequence=512)
    assert found.because["experts"] > 0


def test_replicas_of_experts_are_apart_by_ep() -> None:
    layout = Layout(dp=16, ep=8, zero=1)
    assert (layout.expert_shards, layout.per_node("edp", 8), layout.per_node("shards", 8)) == (2, 1, 8)
    assert ParameterShares(architecture_of("mixtral-8x7b"), layout, stack_of("megatron")).own > 0


def test_experts_that_few_ranks_hold_have_no_secondary_shards(
    clusters: Callable[[int], mk.Cluster],
) -> None:
    """hpZ keeps them of all other weights, in a run and in its estimate."""
    plan = mk.Plan(dp=4, zero=3, ep=2, dp_secondary=2)
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    held = {}
    for each in (plan, mk.Plan(dp=4, zero=3, ep=2)):
        trace = mk.trace_fake(
            gpt, each, batch=(tokens, tokens), loss=next_token_loss, optimizer=adamw, hardware="8x-a100-nvlink",
            cluster=clusters(1), steps=2,
        )  # fmt: skip
        said = mk.estimate(gpt(), each, "8x-a100-nvlink", global_batch=BATCH, sequence=LENGTH, stack="mpkit")
        held[each] = held_at_peak(trace.ranks[0])["params"], said.stage_memory[0]["params"]
    more = [with_it - without for with_it, without in zip(*held.values(), strict=True)]
    assert more[1] == pytest.approx(more[0], rel=0.05)

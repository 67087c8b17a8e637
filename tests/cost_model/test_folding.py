"""Folding of experts beside attention, as published: it is faster, since their tokens stay inside the node."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

import mpkit as mk
from benchmarks.experts import read_rows, seconds_of_layer
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.communication import network_of
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import FRAGMENTATION, stage_memory
from mpkit.prediction.cost_model.preset import preset_for
from mpkit.prediction.cost_model.shares import ParameterShares
from mpkit.prediction.cost_model.stack import stack_of
from mpkit.prediction.cost_model.step import step_time
from mpkit.trace import Kind

MIXTRAL = Architecture(56, 6144, 48, kv_heads=8, ffn=16384, vocabulary=32768, gated=True, experts=8, top_k=2)
FINE = replace(MIXTRAL, experts=64, top_k=8, expert_ffn=2048)
LLAMA = Architecture(80, 8192, 64, kv_heads=8, ffn=28672, vocabulary=128256, gated=True, experts=8, top_k=2)
QWEN = Architecture(
    28, 3584, 28, kv_heads=4, vocabulary=151936, gated=True, experts=64, top_k=8, expert_ffn=2560, shared_ffn=20480
)  # fmt: skip
PUBLISHED = {
    "8x22B": (MIXTRAL, 128, [(4, 8, 1), (2, 4, 8), (2, 8, 8)], [36.6, 46.3, 49.3]),
    "G8T8": (FINE, 128, [(8, 8, 1), (2, 8, 8), (4, 8, 8)], [8.7, 17.1, 28.8]),
    "57B-A14B": (QWEN, 64, [(4, 4, 1), (2, 4, 4), (2, 4, 4)], [23.1, 35.3, 39.0]),
    "8x70B": (LLAMA, 256, [(8, 4, 8), (8, 8, 16)], [38.8, 41.6]),
}
"""By model: GPUs; (tp, ep, pp) of TP+EP+DP where it fits, of MCore, and of MCore with folding (etp = 1); their model
FLOPs utilization in %. Megatron-Core on H100, 256 samples of 4,096 tokens (Liu et al. 2025, arXiv 2504.14960, table 3;
micro-batches and recomputation are not given)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_methods_are_in_the_published_order(name: str) -> None:
    model, gpus, meshes, utilization = PUBLISHED[name]
    found = []
    for tp, ep, pp in meshes:
        found.append(best_step(model, gpus, tp, ep, pp, etp=1 if len(found) == len(meshes) - 1 else tp))
    assert utilization == sorted(utilization) and found == sorted(found, reverse=True)


def best_step(model: Architecture, gpus: int, tp: int, ep: int, pp: int, *, etp: int) -> float:
    """Return the seconds of the fastest step that fits, over sizes of micro-batches, with and without recomputation."""
    machine, stack, dp = (
        mk.hardware("h100", nodes=gpus // 8, nic="ndr"),
        stack_of("megatron"),
        gpus // tp // pp,
    )
    constants, steps = preset_for(machine.device.name, "megatron").constants, []
    for size in (size for size in (1, 2, 4) if 256 % (dp * size) == 0):
        for recompute in ("none", "full"):
            layout = Layout(
                pp=pp, dp=dp, tp=tp, ep=ep, etp=etp, zero=1, sequence_parallel=True, microbatch=size,
                microbatches=256 // dp // size, recompute=recompute,
            )  # fmt: skip
            shares = ParameterShares(model, layout, stack)
            stages = stage_memory(model, layout, 4096, stack, shares, device=machine.device)
            needed = max(sum(held.values()) for held in stages) * (1 + FRAGMENTATION)
            if needed <= machine.device.memory:
                steps.append(step_time(model, layout, 4096, machine, stack, constants).seconds)
    return min(steps)


FOLDING = """model,method,gpus,seq,gbs,cp,tp,ep,pp,etp,mfu_percent
Mixtral-8x22B,FSDP,128,4096,256,1,8,,,,4.3
Mixtral-8x22B,FSDP+EP,128,4096,256,1,2,8,,,23.4
Mixtral-8x22B,TP+EP+DP,128,4096,256,1,4,8,,,36.6
Mixtral-8x22B,MCore,128,4096,256,1,2,4,8,,46.3
Mixtral-8x22B,MCore+Folding,128,4096,256,1,2,8,8,1,49.3
Mixtral-8x22B-G8T8,FSDP,128,4096,256,1,8,1,,,2.2
Mixtral-8x22B-G8T8,FSDP+EP,128,4096,256,1,4,8,,,9.0
Mixtral-8x22B-G8T8,TP+EP+DP,128,4096,256,1,8,8,,,8.7
Mixtral-8x22B-G8T8,MCore,128,4096,256,1,2,8,8,,17.1
Mixtral-8x22B-G8T8,MCore+Folding,128,4096,256,1,4,8,8,1,28.8
"""
"""Two models of the same table, every method."""
LAYER = """case,seq,hidden,expert_ffn,experts,topk,shared_ffn,forward_ms,backward_ms,max_allocated_bytes
deepseek_a2a_tp1ep8_bf16,4096,7168,2048,32,8,2048,7.1192,10.4827,3442750464
mixtral_a2a_tp1ep8_bf16,4096,4096,14336,8,2,0,4.3269,7.6843,2890180198
"""
"""One layer on 8 H100 (Megatron-LM, tests/functional_tests/test_cases/common/moe_perf)."""


def test_all_methods_of_two_models_are_in_the_published_order(tmp_path: Path) -> None:
    """ZeRO-3 gathers all experts, and replicas of an expert are on other nodes: slow rows wait for both.

    One pair of 20 is not: FSDP+EP with fine-grained experts, published at 9.0 %, and TP+EP+DP, at 8.7 %. Where tp
    divides experts too, a rank dispatches the tokens of its part of the sequence, and the group gathers what arrives.
    """
    (tmp_path / "rows.csv").write_text(FOLDING)
    rows = read_rows(tmp_path / "rows.csv")
    pairs = [pair for pair in combinations(rows, 2) if pair[0].model == pair[1].model]
    wrong = [
        (a.utilization, b.utilization)
        for a, b in pairs
        if (a.predicted > b.predicted) != (a.utilization > b.utilization)
    ]
    assert len(pairs) == 20 and wrong == [(0.09, 0.087)]
    divided = [row for row in rows if row.method in ("TP+EP+DP", "MCore")]
    assert [row.predicted for row in divided] == pytest.approx([row.utilization for row in divided], rel=0.16)


def test_one_layer_takes_what_was_measured() -> None:
    for row in csv.DictReader(LAYER.splitlines()):
        for name, seconds in zip(("forward_ms", "backward_ms"), seconds_of_layer(row), strict=True):
            assert 1e3 * seconds == pytest.approx(float(row[name]), rel=0.15)


def test_an_all_to_all_across_nodes_is_as_fast_as_a_ranks_own_network_card() -> None:
    """Of 16 ranks on 2 nodes each sends half of its bytes to the other node: 8 network cards make that no faster."""
    machine = mk.hardware("2x8-h100-ndr")
    network, nbytes = network_of(machine), 1e9
    assert machine.between is not None
    across = network.time(Kind.ALL_TO_ALL, nbytes, 16, 8)
    assert across == pytest.approx(nbytes / 2 / machine.between.rate(Kind.ALL_TO_ALL), rel=0.05)
    assert across > 4 * network.time(Kind.ALL_TO_ALL, nbytes, 8, 8)


def test_a_token_is_sent_once_to_each_rank_that_it_visits_where_the_software_does_so() -> None:
    """DeepEP: of 8 experts on 8 ranks a token's are on 5.25 of them."""
    machine, layout = mk.hardware("8x-h100-nvlink"), Layout(dp=8, ep=8, etp=1)
    took = []
    for deduplicates in (False, True):
        stack = stack_of("megatron", deduplicates=deduplicates)
        constants = preset_for(machine.device.name, "megatron").constants
        took.append(step_time(FINE, layout, 4096, machine, stack, constants).because["experts"])
    assert took[1] / took[0] == pytest.approx(5.25 / 8, rel=0.05)  # and latencies

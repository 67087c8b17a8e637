"""What was published of Megatron and of mixtures of experts, beside estimates: memory, steps, methods in order."""

import csv
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import median
from typing import Any

import pytest

import mpkit as mk
from benchmarks.experts import (
    EXPERT_ROWS,
    MODELS,
    ExpertCase,
    FoldingRow,
    read_expert_cases,
    read_rows,
    seconds_of_layer,
)  # fmt: skip
from mpkit.devices.catalogue import build_machine
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import MemoryModel
from mpkit.prediction.cost_model.preset import preset_for
from mpkit.prediction.cost_model.stack import MIB, stack_of, workspaces
from mpkit.prediction.cost_model.step import StepModel

SIZES = {"tp": 1, "pp": 1, "dp": 8, "microbatch": 4, "microbatches": 1}
STACK = {
    "fused": False, "gradient": 4, "logits": 6, "transformer_engine": True, "cublas_workspace": 32 * MIB,
    "dropout": True, "placeholders": False, "overlap": False,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    # Megatron-LM's tests/functional_tests/test_cases at d98e8a6 (BSD-3): device, layout, software, bytes at the peak.
    "tp1_pp1_dist_optimizer_no_mmap": ("a100", {"zero": 1}, {}, 4673069568),
    "tp1_pp1_resume_dist_optimizer": ("a100", {"zero": 1}, {"fused": True, "attention_outputs": 2}, 2711714304),
    "tp1_pp1_resume_dist_optimizer on h100": ("h100", {"zero": 1}, {"fused": True}, 2691792384),
    "tp1_pp1_resume_uniform_full_recompute": ("h100", {"recompute": "full"}, {"fused": True}, 2561334272),
    "tp1_pp4_vp1_tunable_overlap": (
        "h100", {"pp": 4, "dp": 2, "microbatches": 5, "virtual_stages": 3, "schedule": "interleaved_1f1b"}, {},
        4622615552,
    ),
    "tp2_pp2_resume_defer_embedding_wgrad": (
        "gb200", {"tp": 2, "pp": 2, "dp": 1, "microbatches": 8, "schedule": "1f1b"},
        {"fused": True, "attention_outputs": 2, "placeholders": True, "deferred": 2}, 1905930752,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_peaks_of_megatrons_cases_are_within_2_percent(name: str) -> None:
    device, sizes, software, peak = CASES[name]
    layout, stack = Layout(**SIZES | sizes), stack_of("megatron", **STACK | software)
    vocabulary = -(-50257 // (128 * layout.tp)) * 128 * layout.tp
    model = Architecture(12, 512, 8, ffn=2048, vocabulary=vocabulary, tied=True, bias=True, positions=1024)
    held = MemoryModel(model, 1024, stack, build_machine(device).device).stages(layout)[-1]
    assert sum(held.values()) - held["context"] == pytest.approx(peak, rel=0.02)


def test_workspaces_follow_the_device_and_the_variable() -> None:
    a100, h100, gpu = (build_machine(name).device for name in ("a100", "h100", "mi300x"))
    torch, megatron = stack_of("pytorch"), stack_of("megatron")
    assert [workspaces(torch, device) / MIB for device in (a100, h100, gpu)] == [16.25, 64, 0]
    assert workspaces(megatron, a100) - workspaces(torch, a100) == 4 * MIB
    assert workspaces(megatron, h100) - workspaces(torch, h100) == 32 * MIB
    assert workspaces(replace(torch, cublas_workspace=32 * MIB), a100) == 64 * MIB


# ---- Memory of Megatron's cases with experts, between steps and at the peak; what experts and routers keep.

MOE = Architecture(2, 512, 8, experts=8, top_k=2)


@pytest.fixture(scope="module")
def expert_cases() -> list[ExpertCase]:
    return [case for case in read_expert_cases() if not case.lacking]


@pytest.mark.parametrize(("apart", "recordings"), [(False, 66), (True, 53)])
def test_both_halves_are_within_7_percent_and_2_in_the_median(
    apart: bool, recordings: int, expert_cases: list[ExpertCase]
) -> None:
    half = [case for case in expert_cases if case.apart == apart]
    assert len(half) == recordings
    resident = [abs(case.errors[0]) for case in half]
    peak = [abs(case.errors[1]) for case in half if not case.resumed]
    assert median(resident) < 0.01 and max(resident) < 0.07
    assert median(peak) < 0.02 and max(peak) < 0.07


def test_every_case_is_predicted_or_says_what_is_lacking() -> None:
    every = read_expert_cases()
    assert len(every) == 151 and sum(bool(case.lacking) for case in every) == 32


def test_ranks_that_share_an_expert_keep_its_tokens_whole() -> None:
    """A token's copies take 2 x 512 bytes for each of 2 visits, on both ranks that share its experts."""
    stack = stack_of("megatron")
    divided, folded = (
        MemoryModel(MOE, 1024, stack).activations(
            0, Layout(tp=2, ep=2, dp=2, etp=etp, sequence_parallel=True)
        )
        for etp in (2, 1)
    )
    assert divided - folded == 1024 * 2 * 2 * 512 / 2


# ---- Experts as published: methods in order, the best plan, one layer in 16 and 8 bits.


@pytest.fixture(scope="module")
def rows() -> list[FoldingRow]:
    return read_rows(EXPERT_ROWS / "moe_folding_T3.csv")


def test_methods_are_in_the_published_order(rows: list[FoldingRow]) -> None:
    """ZeRO-3 gathers all experts, and replicas of an expert are on other nodes: slow rows wait for both.

    Two pairs of 39 are not in order: FSDP+EP is predicted too slow beside TP+EP+DP with fine-grained experts, and with
    the largest model, where TP+EP+DP is predicted to fit with recomputation.
    """
    pairs = [
        (a, b) for a, b in combinations(rows, 2) if a.model == b.model and a.utilization != b.utilization
    ]
    wrong = [
        (a.model, a.method, b.method)
        for a, b in pairs
        if (a.predicted > b.predicted) != (a.utilization > b.utilization)
    ]
    assert len(pairs) == 39
    assert wrong == [(model, "FSDP+EP", "TP+EP+DP") for model in ("Mixtral-8x22B-G8T8", "Llama3-8x70B")]


def test_one_layer_takes_what_was_measured() -> None:
    """One of 24 times is not within 15 %: where tokens are few, DeepEP takes longer than the links account for."""
    wrong = []
    with (EXPERT_ROWS / "moe_layer_h100.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, seconds in zip(("forward_ms", "backward_ms"), seconds_of_layer(row), strict=True):
                if abs(1e3 * seconds / float(row[name]) - 1) > 0.15:
                    wrong.append((row["case"], name))
    assert wrong == [("mixtral_deepep_tp1ep8_fp8", "forward_ms")]


def test_a_token_is_sent_once_to_each_rank_that_it_visits_where_the_software_does_so() -> None:
    """DeepEP: of 8 experts on 8 ranks a token's are on 5.25 of them."""
    machine, layout = mk.hardware("8x-h100-nvlink"), Layout(dp=8, ep=8, etp=1)
    took = []
    for deduplicates in (False, True):
        stack = stack_of("megatron", deduplicates=deduplicates)
        constants = preset_for(machine.device.name, "megatron").constants
        took.append(
            StepModel(MODELS["Mixtral-8x22B-G8T8"], 4096, machine, stack, constants)
            .step(layout)
            .because["experts"]
        )
    assert took[1] / took[0] == pytest.approx(5.25 / 8, rel=0.05)  # and latencies


# ---- How busy experts are, in estimates: the rows and the memory of the busiest rank are those of a run.

MACHINE, MIXTRAL = "8x-h100-nvlink", "mixtral-8x7b"
ASKED: dict[str, Any] = {"global_batch": 64, "sequence": 4096}


@pytest.mark.parametrize("stack", ["pytorch", "megatron", "torchtitan"])
def test_the_busier_the_slower_and_the_fuller(stack: str) -> None:
    """Wherever experts are divided, with tensor parallelism or without; not where each rank has all."""
    for tp, ep, etp in ((1, 8, None), (2, 4, 2), (2, 8, 1), (2, 4, None)):
        plan = mk.Plan(dp=8 // tp, tp=tp, ep=ep, etp=etp, precision="bf16", sequence_parallel=tp > 1)
        found = [
            mk.estimate(MIXTRAL, plan, MACHINE, expert_load=load, stack=stack, **ASKED)
            for load in (None, 1.5, 3)
        ]
        for less, more in pairwise(found):
            assert less.step_time < more.step_time and less.peak_memory < more.peak_memory
    whole = mk.Plan(dp=8, precision="bf16")
    times = {mk.estimate(MIXTRAL, whole, MACHINE, expert_load=load, **ASKED).step_time for load in (None, 3)}
    assert len(times) == 1

"""Memory of Megatron's published cases: what each switch costs, and workspaces of libraries."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.golden import Case, read_cases
from mpkit.devices.catalogue import build_machine
from mpkit.prediction.cost_model.stack import MIB, stack_of, workspaces

COLUMNS = [
    "case", "file", "t_med", "mem", "mem_max", "tensor-model-parallel-size", "pipeline-model-parallel-size",
    "context-parallel-size", "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "seq-length",
    "micro-batch-size", "global-batch-size", "num-layers-per-virtual-pipeline-stage", "recompute-granularity",
    "sequence-parallel", "use-distributed-optimizer", "bf16", "fp16", "fp8-format", "num-query-groups",
    "transformer-impl", "overlap-grad-reduce", "nodes", "gpus_per_node",
]  # fmt: skip
"""Columns of Megatron-LM's golden values (tests/functional_tests/test_cases at d98e8a6, BSD-3)."""
SIZES = {
    "num-layers": 12, "hidden-size": 512, "num-attention-heads": 8, "seq-length": 1024, "micro-batch-size": 4,
    "global-batch-size": 32, "bf16": "true", "transformer-impl": "transformer_engine", "nodes": 1, "gpus_per_node": 8,
}  # fmt: skip


def _row(
    case: str, device: str, tp: int, pp: int, resident: int, peak: int, **options: Any
) -> dict[str, Any]:
    return SIZES | {
        "case": f"gpt/gpt3_mcore_{case}", "file": f"golden_values_dev_dgx_{device}.json", "mem": resident,
        "mem_max": peak, "tensor-model-parallel-size": tp, "pipeline-model-parallel-size": pp,
    } | {name.replace("_", "-"): value for name, value in options.items()}  # fmt: skip


ROWS = [
    _row("te_tp1_pp1_dist_optimizer_no_mmap_bin_files", "a100", 1, 1, 552128512, 4673069568,
         use_distributed_optimizer="true", t_med=0.112),
    _row("te_tp1_pp1_resume_torch_dist_dist_optimizer", "a100", 1, 1, 552128512, 2711714304,
         use_distributed_optimizer="true", t_med=0.107),
    _row("te_tp1_pp1_resume_torch_dist_dist_optimizer", "h100", 1, 1, 581489664, 2691792384,
         use_distributed_optimizer="true"),
    _row("te_tp1_pp1_resume_torch_dist_uniform_full_recompute", "h100", 1, 1, 1259751936, 2561334272,
         recompute_granularity="full"),
    _row("te_tp1_pp4_vp1_tunable_overlap", "h100", 1, 4, 759682560, 4622615552, global_batch_size=40,
         num_layers_per_virtual_pipeline_stage=1),
    _row("te_tp2_pp2_resume_torch_dist_defer_embedding_wgrad_compute_1node", "gb200", 2, 2, 542802432, 1905930752,
         gpus_per_node=4),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden")
    with (path / "megatron_golden.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({name: row.get(name, "") for name in COLUMNS} for row in ROWS)
    return path


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    return read_cases(folder)


def test_peaks_of_megatrons_cases_are_within_2_percent(cases: list[Case]) -> None:
    assert len(cases) == len(ROWS)
    assert all(abs(case.error) <= 0.02 for case in cases), {case.name: case.error for case in cases}


def test_workspaces_follow_the_device_and_the_variable() -> None:
    a100, h100, gpu = (build_machine(name).device for name in ("a100", "h100", "mi300x"))
    torch, megatron = stack_of("pytorch"), stack_of("megatron")
    assert [workspaces(torch, device) / MIB for device in (a100, h100, gpu)] == [16.25, 64, 0]
    assert workspaces(megatron, a100) - workspaces(torch, a100) == 4 * MIB
    assert workspaces(megatron, h100) - workspaces(torch, h100) == 32 * MIB
    assert workspaces(replace(torch, cublas_workspace=32 * MIB), a100) == 64 * MIB

"""Imported traces on other hardware: kernels scale by what bounds them, or a note says that they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mpkit as mk
from mpkit.devices.hardware import Hardware, Link
from mpkit.timeline.foreign.actions import FIXED
from mpkit.timeline.foreign.open_trace import OpenedTrace
from mpkit.trace import Kind
from tests.kineto.program import Program

H100, MI300X = mk.hardware("8x-h100-nvlink").device, mk.hardware("8x-mi300x").device


def one_kernel(
    folder: Path, name: str, dtype: str = "c10::BFloat16", gpu: str = "NVIDIA H100 80GB HBM3"
) -> OpenedTrace:
    program = Program(gpu=gpu)
    program.kernel(name, 0, 20, 1000, shapes=[[64, 64], [64, 64]], types=[dtype, dtype])
    path = folder / "trace.json"
    path.write_text(json.dumps(program.json()))
    return mk.open(path)


BOUNDS: dict[str, tuple[str, str, float]] = {
    "in 16 bits": (
        "sm90_xmma_gemm_bf16bf16_tn",
        "c10::BFloat16",
        H100.rate("bfloat16") / MI300X.rate("bfloat16"),
    ),
    "in 32 bits": ("sm80_xmma_gemm_f32f32_tn", "float", H100.rate() / MI300X.rate()),
    "in TF32": (
        "cutlass_80_tensorop_s1688gemm_128x64",
        "float",
        H100.rate("tfloat32") / MI300X.rate("tfloat32"),
    ),
    "attention": (
        "pytorch_flash::flash_fwd_kernel",
        "c10::Half",
        H100.rate("bfloat16") / MI300X.rate("bfloat16"),
    ),
    "unaligned": (
        "cutlass_75_tensorop_bf16_s1688gemm_align1",
        "c10::BFloat16",
        H100.bandwidth / MI300X.bandwidth,
    ),
    "elementwise": ("vectorized_elementwise_kernel", "float", H100.bandwidth / MI300X.bandwidth),
}


@pytest.mark.parametrize("what", BOUNDS)
def test_a_kernel_scales_by_what_bounds_it(tmp_path: Path, what: str) -> None:
    name, dtype, factor = BOUNDS[what]
    trace = one_kernel(tmp_path, name, dtype)
    fixed = FIXED * 1e-9
    assert trace.timeline("8x-mi300x").step_time == pytest.approx(fixed + (1e-3 - fixed) * factor, rel=1e-6)
    assert trace.timeline("8x-h100-nvlink").step_time == pytest.approx(1e-3)
    assert any(
        "Each kernel is scaled from H100 SXM to MI300X" in note for note in trace.timeline("8x-mi300x").notes
    )


@pytest.mark.parametrize("gpu", ["AMD Instinct MI210", ""])
def test_what_cannot_be_scaled_is_not_called_modelled(tmp_path: Path, gpu: str) -> None:
    timeline = one_kernel(tmp_path, "gemm", gpu=gpu).timeline("8x-h100-nvlink")
    assert timeline.step_time == pytest.approx(1e-3)
    notes = " ".join(timeline.notes)
    assert "Compute is not modelled for H100 SXM" in notes and "is modelled" not in notes


SLOW = Hardware("slow", H100, Link("slow", 1e-3, 1e6), per_node=3)


def all_to_all(folder: Path, splits: list[Any], width: int = 10, ranks: int = 3) -> OpenedTrace:
    """Three ranks, of which some have files, send rows of so many numbers of four bytes."""
    for rank, rows in enumerate(splits[:ranks]):
        program = Program(rank, len(splits))
        sent = sum(row for row in rows if isinstance(row, int)) * width
        program.collective("all_to_allv", 0, 20, 1000, sent, splits=rows)
        (folder / f"rank{rank}.json").write_text(json.dumps(program.json()))
    return mk.open(folder)


def seconds(trace: OpenedTrace) -> float:
    timeline = trace.timeline(SLOW)
    span = timeline.spans[timeline.spans["kind"] == Kind.ALL_TO_ALL][0]
    return float(span["end"] - span["start"])


def test_an_uneven_all_to_all_takes_what_its_split_sizes_say(tmp_path: Path) -> None:
    trace = all_to_all(tmp_path, [[100, 200, 0], [0, 100, 100], [50, 700, 100]])
    parts = [rank.sent_parts[["member", "bytes"]].tolist() for rank in trace.ranks]
    assert parts[0] == [(0, 4000), (1, 8000)]  # a part of 0 bytes is not written
    assert parts[2] == [(0, 2000), (1, 28000), (2, 4000)]
    assert seconds(trace) == pytest.approx(2 * 1e-3 + 36000 / 1e6)  # rank 1 receives 900 rows

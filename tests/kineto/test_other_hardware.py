"""Imported traces on other hardware: kernels scale by what bounds them, or a note says that they do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mpkit as mk
from mpkit.devices.hardware import Hardware, Link
from mpkit.timeline.foreign.actions import FIXED
from mpkit.timeline.foreign.open_trace import OpenedTrace
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

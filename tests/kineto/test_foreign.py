"""Traces of other versions, devices and tools: what they have is shown as what it is, what is unknown is called so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpkit as mk
from mpkit.timeline.foreign.actions import FIXED
from mpkit.timeline.foreign.announced_plan import InferredStrategy
from mpkit.timeline.foreign.open_trace import OpenedTrace
from tests.kineto.program import ENGINE, HOST, Program, ddp_program, write_ranks


def opened(folder: Path, program: Program | dict[str, Any]) -> OpenedTrace:
    folder.mkdir(exist_ok=True)
    path = folder / "trace.json"
    path.write_text(json.dumps(program.json() if isinstance(program, Program) else program))
    return mk.open(path)


def ddp_without_shapes() -> Program:
    """Return DDP on gloo as torch profiles it by default: nothing says how much is reduced."""
    program = Program(0, 2)
    program.header["distributedInfo"]["backend"] = "gloo"
    for number in range(2):
        at = 1000.0 + 2000 * number
        program.annotation(f"ProfilerStep#{number}", at, 1990)
        program.annotation("DistributedDataParallel.forward", at + 5, 300)
        program.span("cpu_op", "aten::addmm", at + 10, 280)
        program.span("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", at + 400, 500, 200)
        program.span("cpu_op", "aten::mm", at + 410, 480, 200)
        for call in range(10):
            program.span("cpu_op", "c10d::allreduce_", at + 500 + 30 * call, 5, 200)
            program.span("user_annotation", "gloo:all_reduce", at + 520 + 100 * call, 90, 300)
        program.annotation("Optimizer.step#SGD.step", at + 1600, 200)
        program.span("cpu_op", "aten::add_", at + 1610, 100)
    return program


def test_an_unknown_payload_is_not_0_bytes(tmp_path: Path) -> None:
    trace = opened(tmp_path, ddp_without_shapes())
    assert any("The payloads of 20 of 20 communications are unknown" in note for note in trace.notes), (
        trace.notes
    )
    evidence = " ".join(trace.inferred.evidence)
    assert "10 all-reduces among 2 ranks follow in the backward" in evidence
    timeline = trace.timeline()
    assert "without 10 communications of unknown bytes: nothing that is known." in str(timeline.comm_volume())
    assert str(timeline.comm_matrix()).startswith("Nobody is known to send bytes")
    found = str(timeline.diagnose())
    assert "0 B" not in found and "small" not in found


# ---- Imported traces on other hardware: kernels scale by what bounds them, or a note says that they do not.

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
        "sm90_xmma_gemm_bf16bf16_tn", "c10::BFloat16", H100.rate("bfloat16") / MI300X.rate("bfloat16"),
    ),
    "in 32 bits": ("sm80_xmma_gemm_f32f32_tn", "float", H100.rate() / MI300X.rate()),
    "in TF32": (
        "cutlass_80_tensorop_s1688gemm_128x64", "float", H100.rate("tfloat32") / MI300X.rate("tfloat32"),
    ),
    "attention": (
        "pytorch_flash::flash_fwd_kernel", "c10::Half", H100.rate("bfloat16") / MI300X.rate("bfloat16"),
    ),
    "unaligned": (
        "cutlass_75_tensorop_bf16_s1688gemm_align1", "c10::BFloat16", H100.bandwidth / MI300X.bandwidth,
    ),
    "elementwise": ("vectorized_elementwise_kernel", "float", H100.bandwidth / MI300X.bandwidth),
}  # fmt: skip


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


# ---- Plans are those that libraries announce; of what none announces possibilities are listed, and no plan

WORLD = 4
WEIGHT = 4096
Event = Callable[[Program, float], None]


def step(
    program: Program, at: float, forward: Event, backward: Event, after: Event, optimizer: str = "AdamW"
) -> None:
    """Add a step of 2 ms, and what is communicated in its forward, its backward and after its update."""
    program.annotation(f"ProfilerStep#{int(at // 2000)}", at, 1990)
    for number in range(2):
        sizes = {"shapes": [[8, 8], [8, 8]], "types": ["float", "float"]}
        program.kernel("gemm", at + 10 + 20 * number, at + 20 + 200 * number, 150, **sizes)
    forward(program, at + 60)
    program.span("cpu_op", "autograd::engine::evaluate_function: MmBackward0", at + 400, 300, ENGINE)
    program.kernel("gemm", at + 410, at + 450, 300, thread=ENGINE)
    backward(program, at + 450)
    for number in range(2):
        program.span("cpu_op", "torch::autograd::AccumulateGrad", at + 620 + 10 * number, 5, ENGINE, **{
            "Input Dims": [[WEIGHT]], "Input type": ["float"],
        })  # fmt: skip
    program.annotation(f"Optimizer.step#{optimizer}.step", at + 1000, 100)
    program.kernel("adam", at + 1010, at + 1100, 100, op="aten::_foreach_add_")
    after(program, at + 1200)


def nothing(program: Program, at: float) -> None:
    pass


def calls(kind: str, elements: list[int], thread: int, ranks: list[int] | None = None) -> Event:
    def add(program: Program, at: float) -> None:
        for number, count in enumerate(elements):
            start = at + 20 * number
            program.collective(kind, start, start + 5, start + 15, count, thread=thread, ranks=ranks)

    return add


def both(*events: Event) -> Event:
    return lambda program, at: (
        [event(program, at + 100 * number) for number, event in enumerate(events)] and None
    )


def annotated(name: str) -> Event:
    return lambda program, at: program.annotation(name, at, 5)


def inferred(
    folder: Path, forward: Event = nothing, backward: Event = nothing, after: Event = nothing, **more: str
) -> InferredStrategy:
    programs = [Program(rank, WORLD) for rank in range(WORLD)]
    for program in programs:
        for number in range(2):
            step(program, 2000.0 * number, forward, backward, after, **more)
    return mk.open(write_ranks(folder, programs)).inferred


ACTIVATIONS = [2048, 2048, 2048]
DDP = "DistributedDataParallel.forward"


def test_what_no_library_announces_is_no_plan(tmp_path: Path) -> None:
    found = inferred(tmp_path, calls("allreduce", ACTIVATIONS, HOST))
    assert found.plan is None and str(found).startswith("No plan follows from this trace.")
    assert "3 all-reduces among 4 ranks within forwards, which no library names" in str(found)


def test_ddp_announces_itself(tmp_path: Path) -> None:
    found = inferred(tmp_path, annotated(DDP), calls("allreduce", [WEIGHT, WEIGHT], ENGINE))
    assert found.plan == mk.Plan(dp=4)
    beside = both(annotated(DDP), calls("allreduce", ACTIVATIONS, HOST))
    found = inferred(tmp_path / "tp", beside, calls("allreduce", [WEIGHT, WEIGHT], ENGINE))
    assert found.plan is None and "which no library names" in str(found)


def test_a_given_plan_names_the_axes_if_the_groups_lie_along_them(tmp_path: Path) -> None:
    inferred(tmp_path, calls("allreduce", ACTIVATIONS, HOST))
    assert mk.open(tmp_path, plan=mk.Plan.tp(4)).timeline().mesh is not None
    with pytest.raises(ValueError, match="the trace has 4 ranks, and not all of their groups lie along"):
        mk.open(tmp_path, plan=mk.Plan.tp(2))


def test_an_optimizer_that_is_divided(tmp_path: Path) -> None:
    found = inferred(
        tmp_path, annotated(DDP), calls("allreduce", [2 * WEIGHT], ENGINE),
        calls("broadcast", [WEIGHT, WEIGHT], HOST), optimizer="ZeroRedundancyOptimizer",
    )  # fmt: skip
    assert found.plan == mk.Plan(dp=4, zero=1)


# ---- What is said of an imported trace: by the numbers that the program gave its ranks, of whole steps only.


def test_texts_name_a_rank_by_its_own_number(tmp_path: Path) -> None:
    """The only file is of rank 3: no text calls it rank 0."""
    timeline = mk.open(write_ranks(tmp_path, [ddp_program(3, 4)])).timeline()
    found = timeline.diagnose()
    words = [str(timeline.critical_path()), *(each.words for each in found)]
    assert "It is on rank 3 100" in words[0]
    assert not any("ank 0" in each for each in words)


def test_a_rank_without_a_number_is_not_called_0(tmp_path: Path) -> None:
    program = ddp_program(0, 1)
    program.header["distributedInfo"] = {"backend": "nccl"}
    write_ranks(tmp_path, [program])
    path = (tmp_path / "rank0.json").rename(tmp_path / "trace.json")
    timeline = mk.open(path).timeline()
    assert "rank ? · forward" in str(timeline.critical_path())


@pytest.mark.parametrize("cut", [0.05, 0.4])
def test_a_step_within_which_recording_ended_is_left_out(tmp_path: Path, cut: float) -> None:
    program = ddp_program(0, 1, steps=3)
    begins = max(event["ts"] for event in program.events if event.get("name", "").startswith("ProfilerStep"))
    end = begins + 2000 * cut * 0.45
    program.events = [event for event in program.events if event["ts"] < end]
    for event in program.events:
        if event.get("name", "") == "ProfilerStep#5":
            event["dur"] = end - begins
    trace = mk.open(write_ranks(tmp_path, [program]))
    assert trace.timeline().steps == [3, 4]
    assert any("Step 5 of rank 0 was cut off after" in note for note in trace.notes), trace.notes
    whole = mk.open(write_ranks(tmp_path / "whole", [ddp_program(0, 1, steps=3)]))
    assert whole.timeline().steps == [3, 4, 5]

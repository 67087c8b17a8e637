"""Traces of other versions, devices and tools: what they have is shown as what it is, what is unknown is called so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mpkit as mk
from mpkit.timeline.foreign.open_trace import OpenedTrace
from mpkit.trace import Kind
from tests.kineto.program import HOST, Program, ddp_program


def of_2021(trace: dict[str, Any]) -> dict[str, Any]:
    """Return a trace as torch 1.8 wrote it: annotations are operators, and backwards have no engine around them."""
    words = {"cpu_op": "Operator", "user_annotation": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel",
             "gpu_memcpy": "Memcpy"}  # fmt: skip
    for event in trace["traceEvents"]:
        event["cat"] = words.get(event.get("cat"), event.get("cat"))
        event["name"] = event.get("name", "").removeprefix("autograd::engine::evaluate_function: ")
        if event["cat"] in ("Kernel", "Memcpy", "Runtime"):
            event["args"]["external id"] = event["args"].pop("External id")
    return trace


def opened(folder: Path, program: Program | dict[str, Any]) -> OpenedTrace:
    folder.mkdir(exist_ok=True)
    path = folder / "trace.json"
    path.write_text(json.dumps(program.json() if isinstance(program, Program) else program))
    return mk.open(path)


def test_the_format_of_2021(tmp_path: Path) -> None:
    now, then = (
        opened(tmp_path / "now", ddp_program()),
        opened(tmp_path / "then", of_2021(ddp_program().json())),
    )
    columns = ["kind", "step", "start", "end", "name"]
    new, old = (trace.timeline().to_dataframe()[columns] for trace in (now, then))
    assert (new.kind == "backward").sum() and (new.kind == "data").sum() == 2
    assert old.to_dict() == new.to_dict()
    assert then.timeline().steps == [3, 4]


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


def test_a_device_of_mtia_computes(tmp_path: Path) -> None:
    program = ddp_program(0, 1)
    program.header["deviceProperties"] = []
    for event in program.events:
        event["cat"] = {"kernel": "mtia_ccp_events", "cuda_runtime": "mtia_runtime"}.get(
            event.get("cat"), event.get("cat")
        )
    trace = opened(tmp_path, program)
    assert trace.meta["hardware"] == "a GPU"
    assert trace.timeline().busy[0] == pytest.approx(2 * 900e-6 / 2, rel=1e-6)


def ascend() -> dict[str, Any]:
    """Return what torch_npu writes: the device's events are of no category, on a process of its own."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 5, "tid": 0, "ts": 0, "args": {"name": "Ascend Hardware"}},
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mm",
            "pid": HOST,
            "tid": HOST,
            "ts": 10,
            "dur": 20,
            "args": {},
        },
    ]
    for number in range(9):
        events.append(
            {
                "ph": "X",
                "name": "MatMulV2",
                "pid": 5,
                "tid": 1,
                "ts": 30 + 100 * number,
                "dur": 90,
                "args": {},
            }
        )
    return {"traceEvents": events}


def test_a_device_whose_events_are_not_known_is_not_called_a_cpu(tmp_path: Path) -> None:
    trace = opened(tmp_path, ascend())
    assert "none (9 events, 89.0 % of the time)" in trace.notes[-1]
    assert trace.meta["hardware"] == "a device whose events are of unknown categories"


def jax() -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    for pid, name in ((1, "/host:CPU"), (3, "/device:GPU:0")):
        events.append(
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
        )
        for number in range(20):
            events.append({"ph": "X", "name": "fusion", "pid": pid, "tid": 4, "ts": 100 * number, "dur": 20})
    return {"displayTimeUnit": "ns", "traceEvents": events}


def test_spans_of_another_tool_are_not_advised_on(tmp_path: Path) -> None:
    trace = opened(tmp_path, jax())
    assert "process 3 (/device:GPU:0)" in str(trace)
    found = trace.timeline().diagnose()
    assert not len(found) and "what they do is not known" in str(found)


CUSTOM = {
    "void deep_ep::internode::dispatch<false, 4>(int4*)": Kind.ALL_TO_ALL,
    "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8, 2, 16>(int4*)": Kind.ALL_TO_ALL,
    "void deep_ep::intranode::combine<__nv_bfloat16, 4, 768>(int)": Kind.ALL_TO_ALL,
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)": Kind.ALL_REDUCE,
    "void sglang::cross_device_reduce_2stage<half, 4>()": Kind.ALL_REDUCE,
    "two_shot_all_reduce_kernel": Kind.ALL_REDUCE,
    "multimem_all_gather_kernel": Kind.ALL_GATHER,
    "nvshmemi_alltoall_block": Kind.ALL_TO_ALL,
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<2>()": Kind.ALL_REDUCE,
}


@pytest.mark.parametrize("name", CUSTOM)
def test_kernels_that_communicate_without_nccl(tmp_path: Path, name: str) -> None:
    program = ddp_program(0, 8, steps=1)
    program.kernel(name, 1350, 1900, 80, stream=33)
    trace = opened(tmp_path, program)
    spans = trace.timeline().spans
    assert (spans["kind"] == CUSTOM[name]).sum() == 1 + (CUSTOM[name] == Kind.ALL_REDUCE)
    assert trace.timeline().busy[0] == pytest.approx(900e-6)
    assert any("names no group, taken for one among all ranks (1)" in note for note in trace.notes)


def test_communication_of_an_unknown_kind_is_counted(tmp_path: Path) -> None:
    program = ddp_program(0, 8, steps=1)
    program.kernel("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage)", 1350, 1900, 80, stream=33)
    assert any(
        "communication of unknown kind, left out (1)" in note for note in opened(tmp_path, program).notes
    )


def test_inference_gets_no_advice_for_trainings(tmp_path: Path) -> None:
    program = Program()
    for number in range(50):
        program.kernel("gemm", 100.0 * number, 100.0 * number + 10, 20)
    trace = opened(tmp_path, program)
    (found,) = trace.timeline().diagnose()
    assert found.kind == "host-bound"
    assert (
        "larger batches" in found.remedy and "optimizer" not in found.remedy and "micro" not in found.remedy
    )

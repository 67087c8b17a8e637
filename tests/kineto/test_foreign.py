"""Traces of other versions, devices and tools: what they have is shown as what it is, what is unknown is called so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mpkit as mk
from mpkit.timeline.foreign.open_trace import OpenedTrace
from tests.kineto.program import Program, ddp_program


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

"""Plans are those that libraries announce; of what none announces the possibilities are listed, and no plan follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import mpkit as mk
from mpkit.timeline.foreign.announced_plan import InferredStrategy
from tests.kineto.program import ENGINE, HOST, Program, write_ranks

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


@pytest.mark.parametrize(
    ("forward", "backward", "says"),
    [
        (calls("allreduce", ACTIVATIONS, HOST), nothing, "it fits layers that are divided (tp=4)"),
        (
            nothing,
            calls("allreduce", [WEIGHT, WEIGHT], ENGINE),
            "it fits replicas (dp=4), or layers that are divided",
        ),
        (
            nothing,
            calls("reduce_scatter", [WEIGHT], ENGINE),
            "it fits sharded parameters (dp=4, zero=1 to 3)",
        ),
    ],
)
def test_what_no_library_announces_is_no_plan_but_possibilities(
    tmp_path: Path, forward: Event, backward: Event, says: str
) -> None:
    found = inferred(tmp_path, forward, backward)
    assert found.plan is None and str(found).startswith("No plan follows from this trace.")
    assert says in str(found) and "which no library names" in str(found)


def test_ddp_announces_itself(tmp_path: Path) -> None:
    found = inferred(tmp_path, annotated(DDP), calls("allreduce", [WEIGHT, WEIGHT], ENGINE))
    assert found.plan == mk.Plan(dp=4)
    beside = both(annotated(DDP), calls("allreduce", ACTIVATIONS, HOST))
    found = inferred(tmp_path / "tp", beside, calls("allreduce", [WEIGHT, WEIGHT], ENGINE))
    assert found.plan is None and "tp=4" in str(found)


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

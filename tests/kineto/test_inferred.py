"""Plans that are inferred: what contradicts a plan is said, and no plan has more ranks than there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import mpkit as mk
from mpkit.timeline.foreign.inference.infer import InferredStrategy
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


def redistributing(program: Program, at: float) -> None:
    """DTensor's functions are recorded in the backward, too."""
    recorded = {"Sequence number": 7, "Fwd thread id": 0}
    program.span("cpu_op", "NestedRedistribute", at + 10, 5, ENGINE, **recorded)
    program.span("cpu_op", "_FromTorchTensor", at + 20, 5, ENGINE, **recorded)


def test_layers_divided_by_dtensor_are_no_replicas_and_recompute_nothing(tmp_path: Path) -> None:
    forward, backward = calls("allreduce", ACTIVATIONS, HOST), calls("allreduce", ACTIVATIONS[:2], ENGINE)
    found = inferred(tmp_path, forward, both(backward, redistributing))
    assert found.plan == mk.Plan(tp=4)
    assert "where DTensor redistributes" in str(found)


def test_reductions_of_each_parameter_are_replicas_without_ddp(tmp_path: Path) -> None:
    found = inferred(tmp_path, backward=calls("allreduce", [WEIGHT, WEIGHT], ENGINE))
    assert found.plan == mk.Plan(dp=4)


def test_reductions_of_something_else_are_not_read_as_replicas(tmp_path: Path) -> None:
    found = inferred(tmp_path, backward=calls("allreduce", [5000, 999], ENGINE))
    assert found.plan == mk.Plan()
    assert "have 5,999 elements, and the gradients 8,192: they are not read as data parallelism" in str(found)


def test_degrees_do_not_exceed_the_ranks(tmp_path: Path) -> None:
    forward = both(annotated("DistributedDataParallel.forward"), calls("allreduce", ACTIVATIONS, HOST))
    found = inferred(tmp_path, forward, calls("allreduce", [2 * WEIGHT], ENGINE))
    assert found.plan == mk.Plan(dp=4)
    assert "dp=4 x tp=4 would be 16 ranks, and there are 4. So tp is not in the plan" in str(found)


@pytest.mark.parametrize("grouped", [True, False])
def test_hybrid_shards(tmp_path: Path, grouped: bool) -> None:
    """Files of CPU ranks do not tell a call's group, so all groups look like the world."""
    shard, replicas = ([0, 1], [0, 2]) if grouped else (None, None)
    gather = both(annotated("FSDP::all_gather (layer)"), calls("allgather", [4 * WEIGHT], HOST, shard))
    reduce = both(
        calls("reduce_scatter", [4 * WEIGHT], ENGINE, shard),
        calls("allreduce", [2 * WEIGHT], ENGINE, replicas),
    )
    found = inferred(tmp_path, gather, both(annotated("FSDP::all_gather (layer)"), reduce))
    assert found.plan == mk.Plan(dp=4, zero=3, dp_shard=2)
    assert "among 2 ranks in the forward" in str(found)
    assert "hybrid shards, 2 copies of 2 shards" in str(found)


def test_an_optimizer_that_is_divided(tmp_path: Path) -> None:
    whole = [2 * WEIGHT]
    megatron = inferred(
        tmp_path / "a", backward=calls("reduce_scatter", whole, ENGINE), after=calls("allgather", whole, HOST)
    )
    assert megatron.plan == mk.Plan(dp=4, zero=1)
    torch_s = inferred(
        tmp_path / "b", annotated("DistributedDataParallel.forward"), calls("allreduce", whole, ENGINE),
        calls("broadcast", [WEIGHT, WEIGHT], HOST), optimizer="ZeroRedundancyOptimizer",
    )  # fmt: skip
    assert torch_s.plan == mk.Plan(dp=4, zero=1)


def test_tokens_that_go_to_experts(tmp_path: Path) -> None:
    found = inferred(tmp_path, calls("all_to_allv", [512, 512], HOST, [0, 1]))
    assert "2 all-to-alls among 2 ranks within the forwards" in str(found)


def attention(program: Program, at: float) -> None:
    program.kernel("flash_fwd_kernel", at, at + 2, 2, op="aten::scaled_dot_product_attention")


def in_turn(*events: Event) -> Event:
    """Events of a forward, each after the one before."""
    return lambda program, at: [event(program, at + 30 * i) for i, event in enumerate(events)] and None


def exchange(elements: int, ranks: list[int]) -> Event:
    return calls("all_to_all", [elements], HOST, ranks)


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2, 3]])
def test_heads_that_are_exchanged_for_sequences(tmp_path: Path, ranks: list[int]) -> None:
    """Ulysses' ranks hold the same weights: their gradients are summed with those of the replicas."""
    rows = exchange(2048, ranks)
    forward = in_turn(rows, rows, rows, attention, rows)
    found = inferred(tmp_path, forward, calls("allreduce", [WEIGHT, WEIGHT], ENGINE))
    assert found.plan == mk.Plan(dp=4 // len(ranks), cp=len(ranks), cp_method="ulysses")
    assert "4 for each of 1 attentions, before and after it: heads are exchanged" in str(found)


@pytest.mark.parametrize("counted", [True, False])
def test_experts_that_are_divided(tmp_path: Path, counted: bool) -> None:
    """By the counts that go before rows, or by the attention that goes before both."""
    rows, counts = exchange(2048, [0, 1]), exchange(4, [0, 1])
    forward = in_turn(counts, rows, rows) if counted else in_turn(attention, *[nothing] * 4, rows, rows)
    found = inferred(tmp_path / "a", forward, calls("allreduce", [WEIGHT, WEIGHT], ENGINE))
    assert found.plan == mk.Plan(dp=4, ep=2)
    assert "experts are divided, ep=2" in str(found)
    alone = inferred(tmp_path / "b", forward)
    assert alone.plan == mk.Plan(dp=2, ep=2)

"""Programs that know nothing of mpkit, watched: their results stay, and their traces are complete."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.allocator import Peak, peak_of
from mpkit.trace import Kind, Trace
from tests.serial import Clusters
from tests.watch import programs
from tests.watch.programs import PROGRAMS, STEPS, WEIGHTS

Program = Callable[[], list[float]]


def started(ctx: Any, program: Program) -> list[float]:
    return program()


def counts(trace: Trace, rank: int = 0) -> dict[str, int]:
    """How many communications of each kind a rank's trace holds."""
    kinds = trace.ranks[rank].ops["kind"]
    return {
        kind.word: int((kinds == kind).sum()) for kind in Kind if 32 <= kind < 64 and (kinds == kind).any()
    }


def check_collectives(trace: Trace) -> None:
    """Each communication is on the trace once, with the program's line."""
    # all_gather_object gathers a length and the bytes
    both = {"all_reduce": 2, "all_gather": 4, "broadcast": 1, "barrier": 1, "reduce_scatter": 1, "all_to_all": 1,
            "reduce": 1, "scatter": 1, "gather": 1}  # fmt: skip
    assert counts(trace, 0) == {**both, "send": 2, "recv": 1}
    assert counts(trace, 1) == {**both, "send": 1, "recv": 2}
    ops, both_parts = trace.ranks[0].ops, 2 * 4 * 4
    for kind in (Kind.REDUCE_SCATTER, Kind.SCATTER, Kind.GATHER):  # the payload is that of all ranks
        assert ops["bytes"][ops["kind"] == kind].tolist() == [both_parts]
    assert ops["bytes"][ops["kind"] == Kind.ALL_GATHER].tolist()[:2] == [both_parts, both_parts]
    where = trace.ranks[0].name(int(trace.ranks[0].ops["where"][0]))
    assert where.split("/")[-1].startswith("programs.py:") and where.endswith(" in collectives")


def check_pipeline(trace: Trace) -> None:
    """Stages and micro-batches are named."""
    for number, rank in enumerate(trace.ranks):
        ops = rank.ops[(rank.ops["depth"] == 0) & (rank.ops["step"] == STEPS - 1)]
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            these = ops[ops["kind"] == kind]
            assert these["microbatch"].tolist() == [0, 1, 2, 3] and set(these["stage"]) == {number}
        assert (ops["kind"] == Kind.COMPUTE).sum() == (4 if number else 0)  # the losses, on the last stage


CHECKS: dict[Program, Callable[[Trace], None]] = {
    programs.collectives: check_collectives,
    programs.pipeline: check_pipeline,
}
PAYLOADS: dict[Program, dict[str, int]] = {  # of a step: those of the papers
    programs.ddp: {"all_reduce": WEIGHTS * 4},
    programs.fsdp1: {"all_gather": WEIGHTS * 4, "reduce_scatter": WEIGHTS * 4},
    programs.fsdp2: {"all_gather": 2 * WEIGHTS * 4, "reduce_scatter": WEIGHTS * 4},
    programs.zero_optimizer: {"all_reduce": WEIGHTS * 4, "broadcast": WEIGHTS * 4},
    programs.tensor_parallel: {"all_reduce": 8 * 8 * 4},
}
SLOW = (programs.ddp_static_with_hook, programs.compiled)


@pytest.mark.parametrize(
    "program",
    [pytest.param(program, marks=pytest.mark.soak if program in SLOW else ()) for program in PROGRAMS],
    ids=lambda program: program.__name__,
)
def test_a_watched_program_does_what_it_did_and_leaves_a_complete_trace(
    program: Program, clusters: Clusters
) -> None:
    cluster = clusters(2)
    alone = cluster.run(started, program)
    assert cluster.run(started, program, watch=True) == alone
    trace = cluster.trace.check()
    for rank in trace.ranks:
        ops = rank.ops
        assert (ops["end"] > 0).all(), [rank.name(int(op["name"])) for op in ops[ops["end"] == 0]]
        waits = ops[ops["kind"] == Kind.WAIT]
        communications = np.flatnonzero((ops["kind"] >= 32) & (ops["kind"] < 64))
        assert set(communications) <= set(waits["ref"])  # each was waited for
        for channel in set(ops["group"][communications]):  # and they are counted
            numbers = ops["number"][communications][ops["group"][communications] == channel]
            assert numbers.tolist() == list(range(len(numbers)))
    timeline = cluster.timeline()
    if program is not programs.collectives:
        kinds = trace.ranks[0].ops["kind"]
        assert (kinds == Kind.STEP).sum() == STEPS
        assert {Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER} <= set(kinds)
        assert timeline.step_time > 0
    if program in CHECKS:
        CHECKS[program](trace)
    if program in PAYLOADS:
        for sent in timeline.comm_bytes:
            assert {kind: nbytes for kind, nbytes in sent.items() if nbytes} == PAYLOADS[program]


def exchange_unevenly() -> list[float]:
    """Send rows of 8 bytes: of 3, rank 0 keeps the first, and rank 1 the last."""
    splits = [1, 2] if dist.get_rank() == 0 else [2, 1]
    dist.all_to_all_single(torch.empty(3, 2), torch.ones(3, 2), splits, splits)
    return []


def test_parts_of_uneven_all_to_alls_are_recorded(clusters: Clusters) -> None:
    cluster = clusters(2)
    cluster.run(started, exchange_unevenly, watch=True)
    sent = [rank.sent_parts[["member", "bytes"]].tolist() for rank in cluster.trace.check().ranks]
    assert sent == [[(0, 8), (1, 16)], [(0, 16), (1, 8)]]
    assert cluster.timeline().comm_matrix().bytes.tolist() == [[0, 16], [16, 0]]


# ---- What a watched program's actions cost: memory beside torch.profiler's, FLOPs beside their formula.

BATCH, WIDTH, BLOCKS = 2048, 64, 4
MATRICES = BLOCKS * 2 * 4 * WIDTH * WIDTH + WIDTH * 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def larger(ctx: Any, program: FunctionType) -> list[float]:
    """The program with a model and a batch of some megabytes."""

    def mlp() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 8))

    def batch(seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(BATCH, WIDTH), torch.randint(0, 8, (BATCH,))

    program.__globals__.update(mlp=mlp, batch=batch)  # those of the rank's copy
    losses: list[float] = program()
    return losses


def profiled(ctx: Any, program: FunctionType) -> Peak:
    """The peak of torch's allocator while the program runs."""
    return peak_of(lambda: larger(ctx, program))


@pytest.mark.parametrize("program", [
    programs.ddp, programs.late_states,
    *[
        pytest.param(program, marks=pytest.mark.soak)
        for program in (programs.fsdp2, programs.fsdp1, programs.zero_optimizer, programs.pipeline)
    ],
], ids=lambda program: program.__name__)  # fmt: skip
def test_peak_memory_is_the_profilers(program: Any, clusters: Clusters) -> None:
    cluster = clusters(2)
    peaks = cluster.run(profiled, program)
    cluster.run(larger, program, watch=True)
    for peak, held in zip(peaks, cluster.timeline().peak_memory, strict=True):
        assert abs(peak.off(held["total"])) <= 0.03


def test_memory_is_counted_by_category_and_flops_of_every_step_are_those_of_the_formula(
    clusters: Clusters,
) -> None:
    clusters(2).run(larger, programs.fsdp2, watch=True)
    size = 4 * (MATRICES + BLOCKS * 5 * WIDTH + 8)
    for held in clusters(2).timeline().peak_memory:
        assert (held["params"], held["grads"], held["optimizer"]) == (size // 2, size // 2, size)
    clusters(2).run(larger, programs.ddp, watch=True)
    for held in clusters(2).timeline().peak_memory:
        assert (held["params"], held["grads"], held["optimizer"]) == (size, size, 0)
    ops = clusters(2).trace.ranks[0].ops
    actions = ops[ops["depth"] == 0]
    forward = 2 * BATCH * MATRICES
    unneeded = 2 * BATCH * WIDTH * 4 * WIDTH  # the gradient of the batch
    for step in range(programs.STEPS):
        these = actions[actions["step"] == step]
        assert these["flops"][these["kind"] == Kind.FORWARD].tolist() == [forward]
        assert these["flops"][these["kind"] == Kind.BACKWARD].tolist() == [2 * forward - unneeded]


def keeps_more_than_it_trains(ctx: Any) -> None:
    whole = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    dataset = torch.zeros(100, 64)
    optimizer = torch.optim.SGD(whole[0].parameters(), lr=0.1)
    for _ in range(3):
        whole[0](dataset[:2]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_was_made_before_the_first_action_is_held(clusters: Clusters) -> None:
    cluster = clusters(1)
    cluster.run(keeps_more_than_it_trains, watch=True)
    (held,) = cluster.timeline().peak_memory
    assert held["params"] == 2 * 64 * 64 * 4
    assert held["buffers"] == 100 * 64 * 4

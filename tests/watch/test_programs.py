"""Programs that know nothing of mpkit, watched: their results stay, and their traces are complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mpkit as mk
from mpkit.timeline.foreign.announced_plan import infer
from mpkit.trace import Kind, Trace
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
ANNOUNCED: dict[Program, mk.Plan] = {
    programs.ddp: mk.Plan.ddp(2),
    programs.fsdp2: mk.Plan(dp=2, zero=3),
    programs.zero_optimizer: mk.Plan(dp=2, zero=1),
}
SLOW = (programs.ddp_static_with_hook, programs.compiled)


@pytest.mark.parametrize(
    "program",
    [pytest.param(program, marks=pytest.mark.soak if program in SLOW else ()) for program in PROGRAMS],
    ids=lambda program: program.__name__,
)
def test_a_watched_program_does_what_it_did_and_leaves_a_complete_trace(
    program: Program, clusters: Callable[[int], mk.Cluster]
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
    if program in ANNOUNCED:
        assert infer(trace).plan == ANNOUNCED[program]
    if program in PAYLOADS:
        for sent in timeline.comm_bytes:
            assert {kind: nbytes for kind, nbytes in sent.items() if nbytes} == PAYLOADS[program]


def exchange_unevenly() -> list[float]:
    """Send rows of 8 bytes: of 3, rank 0 keeps the first, and rank 1 the last."""
    splits = [1, 2] if dist.get_rank() == 0 else [2, 1]
    dist.all_to_all_single(torch.empty(3, 2), torch.ones(3, 2), splits, splits)
    return []


def test_parts_of_uneven_all_to_alls_are_recorded(clusters: Callable[[int], mk.Cluster]) -> None:
    cluster = clusters(2)
    cluster.run(started, exchange_unevenly, watch=True)
    sent = [rank.sent_parts[["member", "bytes"]].tolist() for rank in cluster.trace.check().ranks]
    assert sent == [[(0, 8), (1, 16)], [(0, 16), (1, 8)]]
    assert cluster.timeline().comm_matrix().bytes.tolist() == [[0, 16], [16, 0]]

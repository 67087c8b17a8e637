"""A rank that comes late although its kernels are as fast is a straggler: its host, its start or its data is late."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpkit as mk
from mpkit.timeline.diagnosis.evidence import list_ranks
from mpkit.timeline.findings import Diagnosis
from tests.kineto.program import ENGINE, Program, write_ranks

LATE = 5000.0


def rank(number: int, late: float, where: str) -> Program:
    """Return a rank of four whose reduction begins so many us after its own kernels would allow at best.

    Args:
        where: "start", "host", "data" or "kernels": what takes longer.
    """
    program = Program(number, 4)
    for step in range(3):
        at = 20_000.0 * step
        start, gap, load, work = (late * (where == each) for each in ("start", "host", "data", "kernels"))
        program.annotation(f"ProfilerStep#{step}", at, 19_900)
        program.annotation("enumerate(DataLoader)#_Iter.__next__", at + 5 + start, 50 + load)
        at += start + load
        program.annotation("DistributedDataParallel.forward", at + 60, 90)
        program.kernel("gemm", at + 70, at + 100, 3000 + work)
        program.span(
            "cpu_op", "autograd::engine::evaluate_function: MmBackward0", at + 3000 + gap + work, 90, ENGINE
        )
        program.kernel("gemm", at + 3010 + gap + work, at + 3100 + gap + work, 4000, thread=ENGINE)
        end = 20_000.0 * step + 7100 + LATE + 500
        program.collective("allreduce", at + 3030 + gap + work, at + 7100 + gap + work, end, 1_000_000)
        program.annotation("Optimizer.step#SGD.step", end, 200)
        program.kernel("sgd", end + 10, end + 20, 1000, op="aten::_foreach_add_")
    return program


def diagnosed(folder: Path, where: str) -> Diagnosis:
    programs = [rank(number, LATE * (number == 2), where) for number in range(4)]
    return mk.open(write_ranks(folder, programs)).timeline().diagnose()


@pytest.mark.parametrize(
    ("where", "kind", "says"),
    [
        (
            "start",
            "straggler",
            "begins the step 5.00 ms after its peers, and until then has been given nothing to do",
        ),
        ("host", "straggler", "its device stands still between operations for 5.0"),
        ("data", "data loading", "Rank 2 loads data for 5.05 ms per step"),
        ("kernels", "straggler", "takes 1.62 times as long"),
    ],
)
def test_a_late_rank_is_named_with_what_is_late(tmp_path: Path, where: str, kind: str, says: str) -> None:
    found = diagnosed(tmp_path, where)
    first = found[0]
    assert first.kind == kind and first.ranks == (2,)
    assert first.words.startswith("Rank 2")
    assert says in first.words
    assert "the others wait 5.00 ms per step for it" in first.words
    assert kind != "straggler" or "arrives last in 1 of 1 collectives" in first.words
    assert first.gain == pytest.approx(5e-3, rel=0.02)
    assert not [each for each in found if each is not first and "straggler" in each.kind]
    assert not found.of("host-bound")


@pytest.mark.parametrize("ranks", [(2, 3), (1, 2, 3), (0, 2)])
@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("start", "{late} come 5.00 ms after {others}: they begin the step later"),
        ("host", "{late} come 5.00 ms per step after {others}: their hosts are late"),
        ("data", "{late} load data for 5.05 ms per step"),
        ("kernels", "{late} take 2.67 times as long for forward as {others}"),
    ],
)
def test_ranks_that_are_late_together_are_one_finding(
    tmp_path: Path, where: str, says: str, ranks: tuple[int, ...]
) -> None:
    programs = [rank(number, LATE * (number in ranks), where) for number in range(4)]
    found = mk.open(write_ranks(tmp_path, programs)).timeline().diagnose()
    named = [list_ranks(str(each) for each in range(4) if (each in ranks) == late) for late in (True, False)]
    words = says.format(late=named[0], others=named[1][:1].lower() + named[1][1:])
    first = found[0]
    assert first.ranks == ranks and first.kind == ("data loading" if where == "data" else "straggler")
    assert first.words.startswith(words)
    assert first.gain == pytest.approx(5e-3, rel=0.03)
    assert not found.not_explained


def test_ranks_that_come_together_are_no_stragglers(tmp_path: Path) -> None:
    programs = [rank(number, LATE, "host") for number in range(4)]
    found = mk.open(write_ranks(tmp_path, programs)).timeline().diagnose()
    assert not found.of("straggler")
    assert found.of("host-bound")


def test_kernels_that_are_a_little_slower_are_named_if_the_others_wait_for_them(tmp_path: Path) -> None:
    programs = [rank(number, 500.0 * (number == 2), "kernels") for number in range(4)]
    (found,) = mk.open(write_ranks(tmp_path, programs)).timeline().diagnose().of("straggler")
    assert "Rank 2 arrives last in 1 of 1 collectives: it takes 1.06 times as long" in found.words

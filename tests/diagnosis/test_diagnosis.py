"""Diagnoses: the planted cause comes first, sound runs have none, and each number can be checked."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mpkit as mk
from mpkit.cli import main
from mpkit.common.units import percent
from mpkit.models import GPT, next_token_loss
from mpkit.plan.mesh import axis_of
from mpkit.timeline import simulation
from mpkit.timeline.diagnosis.evidence import WORTH, list_ranks
from mpkit.timeline.diagnosis.rules import RULES
from mpkit.timeline.findings import Diagnosis
from mpkit.timeline.idleness import bubble_words
from mpkit.timeline.traffic import members_of
from mpkit.trace import Kind
from tests.counted import counted
from tests.diagnosis.planted import (
    CASES,
    Case,
    ddp,
    first_finding,
    full,
    pipeline,
    slow_rank,
    small_messages,
    with_ops,
)  # fmt: skip
from tests.serial import Clusters

KINDS = sorted({case.kind for case in CASES})
MIDDLE = [[case for case in CASES if case.kind == kind][2] for kind in KINDS]


def diagnosed(case: Case) -> tuple[mk.Timeline, Diagnosis]:
    timeline, machine = case.make()
    return timeline, timeline.diagnose(hardware=machine)


def test_a_diagnosis_and_a_comparison_agree_on_idle_time() -> None:
    timeline = mk.simulate(mk.Plan.gpipe(4, 4), forward=[1, 1, 2, 1], hop=0.25)
    found = timeline.diagnose()
    idle = mk.compare(timeline).rows[0].idle
    ordered = sorted(((time, cause) for cause, time in idle.items() if time), reverse=True)
    shares = ", ".join(f"{cause} {percent(time / found.step_time)}" for time, cause in ordered)
    assert f"A rank is idle, on average: {shares}." in str(found)
    assert found.of("schedule's bubble")[0].idle == "dependency"


@pytest.mark.soak
def test_the_first_finding_names_the_planted_cause() -> None:
    wrong = [
        f"{case.kind}, {case.size}: {found}" for case in CASES if (found := first_finding(case)) != case.kind
    ]
    assert len(wrong) <= 5, wrong


@pytest.mark.parametrize("case", MIDDLE, ids=lambda case: case.kind)
def test_a_planted_cause_is_first_and_every_number_can_be_checked(case: Case) -> None:
    timeline, found = diagnosed(case)
    assert found[0].kind == case.kind
    for finding in found:
        assert finding.kind in RULES and finding.words.endswith(".") and finding.reason and finding.remedy
        assert finding.urgent or finding.gain >= WORTH * found.step_time
        assert finding.gain < found.step_time
        assert all(0 <= row < len(found.path.timeline.spans) for row in finding.ops)
        assert eval(finding.check, {"timeline": timeline}) is not None
    assert str(found).count("\n   try: ") == len(found)


@pytest.mark.parametrize(
    "make", [lambda: mk.Timeline.of(ddp()), lambda: mk.Timeline.of(ddp(8))], ids=["4", "8"]
)
def test_a_sound_run_has_no_finding(make: object) -> None:
    timeline = make()  # type: ignore[operator]
    assert list(timeline.diagnose()) == []
    assert "nothing costs 2 % of it or more" in str(timeline.diagnose())


def slower(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(ops: np.ndarray) -> np.ndarray:
        works = ops["kind"] < Kind.WAIT
        ops["cpu"][works] = (ops["cpu"][works] * factor).astype(ops["cpu"].dtype)
        return ops

    return change


@pytest.mark.parametrize("ranks", [[2, 3], [1, 2, 3], [0, 2]])
def test_ranks_that_are_slow_together_are_one_finding(ranks: list[int]) -> None:
    trace = ddp()
    for rank in ranks:
        trace = with_ops(trace, rank, slower(1.7))
    found, sound = mk.Timeline.of(trace).diagnose(), mk.Timeline.of(ddp())
    first = found[0]
    assert (first.kind, first.ranks) == ("straggler", tuple(ranks))
    assert re.match(
        f"{list_ranks(map(str, ranks))} take 1.[67]. times as long for forward and backward", first.words
    )
    assert first.gain == pytest.approx(found.step_time - sound.step_time, rel=0.1)
    assert not found.not_explained and "not explained" not in str(found)


def test_a_large_cause_without_a_finding_is_printed_as_not_explained() -> None:
    """Stages of a program that says nothing of its plan: no rule knows why ranks wait for messages."""
    timeline = mk.simulate(mk.Plan.gpipe(4, 4))
    assert timeline.diagnose().not_explained == ()  # the schedule's own
    alone = replace(timeline, meta={})
    assert set(alone.diagnose().not_explained) == {"dependency", "warm-up", "cool-down"}
    assert "dependency 21.4 % (not explained)" in str(alone.diagnose())


def test_many_collectives_of_a_few_bytes_are_latency() -> None:
    first = small_messages(64, 3e-5).diagnose()[0]
    assert first.kind == "exposed communication" and " of its time is latency: " in first.reason


def test_a_gain_is_what_the_cause_costs() -> None:
    sound, slow = mk.Timeline.of(ddp()), slow_rank(ddp(), 3, 1.6)
    finding = slow.diagnose()[0]
    assert finding.ranks == (3,)
    assert finding.gain == pytest.approx(slow.step_time - sound.step_time, rel=0.05)
    assert "Rank 3 arrives last in" in finding.words


def test_waiting_is_charged_to_the_rank_that_came_last() -> None:
    waiting = slow_rank(ddp(), 3, 1.6).critical_path().waiting
    late = waiting.ranks[:3, 3]
    assert waiting.last[3] == waiting.collectives > 0
    assert (late > 0.9 * (waiting.ranks.sum(axis=1) + waiting.under_way)[:3]).all()
    assert waiting.ranks[3].sum() == 0


def test_what_is_about_to_end_a_run_is_first() -> None:
    timeline, machine = full(0.95)
    slow = slow_rank(ddp(), 1, 2.0)
    assert [each.kind for each in slow.diagnose(hardware=machine)] == ["memory near the limit", "straggler"]
    assert timeline.diagnose(hardware=machine)[0].urgent


TIMES = st.lists(st.floats(0.1, 3.0), min_size=4, max_size=4)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "zb_h1"]), TIMES, TIMES, st.sampled_from([0.0, 0.05]))
def test_a_step_played_with_other_durations_is_the_one_simulated_with_them(
    name: str, before: list[float], after: list[float], hop: float
) -> None:
    plan = mk.Plan.pipeline(name, 4, 6)
    graph = mk.simulate(plan, before, before, before, hop=hop).critical_path()
    spans, factors = graph.timeline.spans, np.array(after) / np.array(before)
    took = graph.graph.took.copy()
    for row, nodes in graph.graph.of_row.items():
        if spans["kind"][row] < Kind.WAIT:
            took[nodes] *= factors[spans["stage"][row]]
    expected = mk.simulate(plan, after, after, after, hop=hop).step_time
    assert graph.graph.time_with(took) == pytest.approx(expected)


def test_it_is_shown_in_a_notebook_and_on_a_page(tmp_path: Path) -> None:
    found = slow_rank(ddp(), 3, 1.6).diagnose()
    panel = found._repr_mimebundle_()["text/html"]
    # A picture for wide columns and one for narrow ones.
    assert panel.count("<details") == len(found) and panel.count("<img") == 2 * len(found)
    page = found.to_html(tmp_path / "found.html")
    assert "Critical path" in page and (tmp_path / "found.html").read_text(encoding="utf-8") == page
    assert 'class="path"' in found.to_svg()
    assert found.of("straggler")[0].kind == "straggler" and repr(found).startswith(
        "<Diagnosis of step 1, 1 finding"
    )


def test_the_command_line_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pipeline().save(tmp_path / "run.trace")
    main(["diagnose", str(path), "--critical", "--html", str(tmp_path / "page.html")])
    printed = capsys.readouterr().out
    assert printed.startswith("Step 1 (the last complete step)") and "Critical path of step 1" in printed
    assert (tmp_path / "page.html").exists()
    with pytest.raises(SystemExit):
        main(["diagnose", str(tmp_path / "none.trace")])
    assert "no such file" in capsys.readouterr().err


# ---- The bubble in a sentence: its parts add up to it, and it names the axis that ranks wait for.

TITANS = "4x-titan-rtx"
PLANS = {"ring": mk.Plan(pp=2, cp=2, schedule="gpipe", microbatches=2), "ep": mk.Plan(dp=4, ep=2)}


def waited_by_axis(timeline: mk.Timeline) -> dict[str, float]:
    """Return the seconds that ranks wait for each axis's communication, inside actions and between them."""
    one = timeline.step(timeline.steps[-1])
    waited: dict[str, float] = {}
    for wait in one.spans[(one.spans["kind"] == Kind.WAIT) & (one.spans["cause"] >= 0)]:
        call = one.spans[wait["cause"]]
        kind, rank, group, peer = (int(call[name]) for name in ("kind", "rank", "group", "peer"))
        members = members_of(one, kind, rank, group, peer)
        axis = axis_of(one.mesh, members, one.meta, exchange=kind == Kind.ALL_TO_ALL)
        # Until a message is sent its receiver waits for the sender's work, which is not communication.
        since = max(wait["start"], call["start"])
        waited[axis] = waited.get(axis, 0.0) + max(float(wait["end"] - since), 0.0)
    return waited


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
@pytest.mark.parametrize("name", PLANS)
def test_the_axis_that_ranks_wait_for_is_named(name: str, clusters: Clusters) -> None:
    model = (
        (lambda: GPT(layers=2, width=32, heads=4, experts=4))
        if name == "ep"
        else (lambda: GPT(layers=2, width=32, heads=4))
    )
    tokens = torch.empty(16, 32, dtype=torch.long, device="meta")
    trace = mk.trace_fake(
        model, PLANS[name], batch=(tokens, tokens), loss=next_token_loss, optimizer=torch.optim.AdamW, hardware=TITANS,
        cluster=clusters(1),
    )  # fmt: skip
    timeline = mk.Timeline.of(trace, TITANS)
    waited = waited_by_axis(timeline)
    most = max(waited, key=lambda axis: waited[axis])
    words = bubble_words(0.2, timeline)
    named = re.search(r"communication \((.*?)\)", words)
    assert named and most in named[1].split(", "), (words, waited)
    assert np.isclose(sum(waited.values()) / 4, sum(timeline.exposed_comm) / 4, rtol=0.3), waited


def test_unlike_times_of_equal_actions_are_jitter_and_no_imbalance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose first micro-batch touches memory for the others has no more to do than its peers."""
    whole = simulation._tables

    def slow_first(*rows: Any) -> tuple[Any, Any]:
        ops, memory = whole(*rows)
        ops["flops"][np.flatnonzero(ops["kind"] == Kind.FORWARD)[0]] *= 3
        return ops, memory

    monkeypatch.setattr(simulation, "_tables", slow_first)
    plan = mk.Plan.gpipe(3, 4)
    timeline = replace(mk.simulate(plan), clock="virtual")
    words = bubble_words(1 / 3, timeline)
    assert "jitter (equal actions took unlike times)" in words and "imbalance" not in words
    shares = [float(share) for share in re.findall(r"([\d.]+) %", words.partition("The ")[2])]
    assert (
        shares[0] == pytest.approx(100 * timeline.bubble, abs=0.06) == pytest.approx(sum(shares[1:]), abs=0.2)
    )


# ---- Causes planted in real runs on CPU ranks, on a clock that counts FLOPs: the first finding names them.

STEPS = 3
SLOW_WIRE, WIRE = (mk.devices.Link("wire", latency, 1e8) for latency in (2e-4, 1e-6))


@pytest.fixture
def two(clusters: Clusters) -> mk.Cluster:
    return clusters(2)


def chain(widths: list[int]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def kinds(timeline: mk.Timeline, **given: Any) -> list[str]:
    return [finding.kind for finding in timeline.diagnose(**given)]


def ran(
    two: mk.Cluster, body: Callable[[nn.Module, Tensor, torch.optim.Optimizer], None], width: int = 64
) -> mk.Trace:
    def run(ctx: Any) -> None:
        model = chain([width] * 5)
        x, optimizer = torch.randn(32, width), torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            body(model, x, optimizer)
            mk.watch.step()

    two.run(run, watch=True)
    return two.trace


def reduced(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        torch.distributed.all_reduce(parameter.grad)


def test_work_that_one_rank_does_more(two: mk.Cluster) -> None:
    def body(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
        y = model(x if torch.distributed.get_rank() else torch.cat([x, x, x]))
        y.square().mean().backward()
        reduced(model)
        optimizer.step()

    trace = ran(two, body)
    found = counted(trace).diagnose()
    assert found[0].kind == "straggler" and found[0].ranks == (0,)
    for each in (counted(trace), mk.Timeline.of(trace), mk.Timeline.of(trace, clock="measured")):
        path = each.critical_path()
        recorded = path.graph.end - path.graph.begin
        assert path.graph.ends == pytest.approx(recorded, abs=1e-3 * path.step_time)
        assert sum(op.seconds for op in path.ops) == pytest.approx(path.step_time)


def test_gradients_that_are_reduced_at_the_end(two: mk.Cluster) -> None:
    def body(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
        model(x).square().mean().backward()
        reduced(model)
        optimizer.step()

    first = counted(ran(two, body), WIRE).diagnose()[0]
    assert first.kind == "exposed communication" and "begins when the backward has ended" in first.reason


def test_barriers_in_the_loop(two: mk.Cluster) -> None:
    def body(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
        rank = torch.distributed.get_rank()
        for number in range(6):
            torch.distributed.barrier()
            model(torch.cat([x, x, x]) if number % 2 == rank else x).square().mean().backward()
        optimizer.step()

    assert kinds(counted(ran(two, body), WIRE))[0] == "synchronizing call"

"""Diagnoses: the planted cause comes first, sound runs have none, and each number can be checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpkit as mk
from mpkit.cli import main
from mpkit.common.units import percent
from mpkit.timeline.diagnosis.evidence import WORTH, list_ranks
from mpkit.timeline.diagnosis.rules import RULES
from mpkit.timeline.findings import Diagnosis
from mpkit.trace import Kind
from tests.diagnosis.planted import (
    CASES,
    Case,
    ddp,
    first_finding,
    full,
    pipeline,
    slow_rank,
    with_ops,
)  # fmt: skip

KINDS = sorted({case.kind for case in CASES})
MIDDLE = [[case for case in CASES if case.kind == kind][2] for kind in KINDS]


def diagnosed(case: Case) -> tuple[mk.Timeline, Diagnosis]:
    timeline, machine = case.make()
    return timeline, timeline.diagnose(hardware=machine)


# ---- held to truth ----------------------------------------------------------------------------------------------


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


# ---- what a finding says ----------------------------------------------------------------------------------------


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


# ---- shown ------------------------------------------------------------------------------------------------------


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
    assert found.to_dataframe().kind.tolist() == [each.kind for each in found]


def test_the_command_line_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pipeline().save(tmp_path / "run.trace")
    main(["diagnose", str(path), "--critical", "--html", str(tmp_path / "page.html")])
    printed = capsys.readouterr().out
    assert printed.startswith("Step 1 (the last complete step)") and "Critical path of step 1" in printed
    assert (tmp_path / "page.html").exists()
    with pytest.raises(SystemExit):
        main(["diagnose", str(tmp_path / "none.trace")])
    assert "no such file" in capsys.readouterr().err

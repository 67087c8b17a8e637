"""What the advice says, and that its sentences can be checked."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import mpkit as mk
from mpkit.cli import main
from mpkit.common.display import draw
from mpkit.common.visible import escape
from mpkit.prediction.advice.advice import Advice, plan_of

GIB = 2**30


@pytest.fixture(scope="module")
def advice() -> Advice:
    return mk.advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)


def test_it_names_the_best_plan_with_its_numbers(advice: Advice) -> None:
    told = str(advice)
    assert advice.best is not None
    best = mk.estimate("llama3-8b", advice.best, "8x-a100-nvlink", global_batch=64, sequence=4096)
    assert repr(advice.best) in told
    assert f"{best.step_time:.2f} s per step" in told
    assert f"{advice.considered:,} plans considered" in told
    assert advice.considered > 5000
    rules = [
        line[2:].split(" The search")[0]
        for line in told.splitlines()
        if line[0] == "-" and "Near miss" not in line
    ]
    assert [rule.says for rule in advice.because] == rules


def test_the_table_and_the_frontier_are_ordered(advice: Advice) -> None:
    table = advice.to_dataframe()
    assert table["step_time"].is_monotonic_increasing
    assert (table["memory"] <= mk.hardware("8x-a100-nvlink").device.memory).all()
    frontier = [advice.estimate(plan) for plan in advice.frontier]
    assert [each.step_time for each in frontier] == sorted(each.step_time for each in frontier)
    assert [each.peak_memory for each in frontier] == sorted(
        (each.peak_memory for each in frontier), reverse=True
    )


def test_the_best_plans_have_timelines(advice: Advice) -> None:
    timelines = advice.timelines(2)
    assert list(timelines) == [repr(plan) for plan in advice.plans[:2]]
    assert len(mk.compare(**timelines).rows) == 2


def test_the_chart_marks_the_frontier(advice: Advice) -> None:
    every, frontier = advice.figure().data
    assert len(every.x) == min(2000, len(advice.found))
    assert list(frontier.text) == [repr(plan) for plan in advice.frontier]
    assert list(frontier.y) == sorted(frontier.y)
    assert min(every.y) == frontier.y[0]
    assert advice.figure().layout.title.text == "llama3-8b on 8x-a100-nvlink, 64 samples of 4096 tokens"


def test_a_notebook_shows_words_table_chart_and_timelines(advice: Advice) -> None:
    words, table, chart, timelines = draw(advice, "parts")
    assert escape(repr(advice.best)) in words.data
    assert [row[0][0] for row in table.rows] == [repr(plan) for plan in advice.plans]
    steps = [row[1][1] for row in table.rows]
    assert steps == sorted(steps)
    assert table.to_html().count("<tr>") == 1 + len(steps)
    assert chart.data == advice.figure().data
    assert "Predicted timelines of the best plans" in timelines.data


def test_why_not_says_what_stands_against_a_plan(advice: Advice) -> None:
    out = advice.why_not(mk.Plan(dp=8, zero=1))
    needed, room, by = (float(number) for number in re.findall(r"(\d+\.\d)", out))
    assert "does not fit" in out
    assert needed - room == pytest.approx(by, abs=0.11)
    slow = advice.why_not(mk.Plan(tp=8, microbatches=64, precision="bf16", sequence_parallel=True))
    assert "% longer than" in slow
    assert "tensor parallel" in slow
    assert "cannot work" in advice.why_not(mk.Plan(tp=16))
    assert advice.best is not None
    assert "as good as any" in advice.why_not(advice.best)
    with pytest.raises(ValueError, match="give a Plan"):
        advice.why_not("ddp")  # type: ignore[arg-type]


def test_rules_follow_the_numbers() -> None:
    small = mk.advise("gpt2", "8x-a100-nvlink", global_batch=64, sequence=1024)
    assert "data parallelism is enough" in str(small)
    assert small.best is not None
    assert small.best.dp == 8
    none = mk.advise("llama3-70b", "2x-rtx-4090", global_batch=8, sequence=4096)
    assert none.best is None
    assert not none.plans
    assert "no plan fits" in str(none)
    assert "or more" in str(none)
    nodes = mk.advise("llama3-8b", "4x8-h100-ndr", global_batch=512, sequence=4096)
    inside = next(rule for rule in nodes.because if "inside the node" in rule.says)
    assert inside.agrees


def test_only_what_the_software_can_do_is_advised() -> None:
    asked = {"global_batch": 64, "sequence": 2048}
    old = mk.advise("llama3-8b", "2x8-h100-ndr", stack="megatron-2021", **asked)
    assert {(found.layout.recompute, found.layout.zero, found.layout.offload) for found in old.found} == {
        ("full", 0, "none")
    }
    fsdp = mk.advise("llama3-8b", "2x8-h100-ndr", stack="llm-foundry", **asked)
    assert {(found.layout.pp, found.layout.tp, found.layout.zero >= 2) for found in fsdp.found} == {
        (1, 1, True)
    }


@pytest.mark.parametrize(
    ("stack", "plan", "words"),
    [
        (
            "megatron-2021",
            mk.Plan(dp=16, zero=3, microbatches=4),
            "megatron-2021 has no ZeRO-3: it has ZeRO-0.",
        ),
        ("megatron-2021", mk.Plan(dp=16, microbatches=4), "no recompute='none': it has 'full'."),
        (
            "nanotron",
            mk.Plan(pp=2, dp=8, microbatches=8, schedule="zb_h1"),
            "no schedule 'zb_h1': it has '1f1b'.",
        ),
        ("nanotron", mk.Plan(dp=16, zero=1, microbatches=4, offload="optimizer"), "no offload='optimizer'"),
        (
            "llm-foundry",
            mk.Plan(tp=2, dp=8, zero=3, microbatches=8),
            "llm-foundry has no tensor parallelism.",
        ),
    ],
)
def test_why_not_says_what_the_software_has_not(stack: str, plan: mk.Plan, words: str) -> None:
    advice = mk.advise("llama3-8b", "2x8-h100-ndr", global_batch=64, sequence=2048, stack=stack)
    assert words in advice.why_not(plan)
    assert advice.best is not None
    assert all("cannot" not in advice.why_not(found) for found in advice.plans)


def test_adam_on_the_host_takes_the_time_of_its_processors() -> None:
    """ZeRO-Offload's table 4: 10 B parameters in 2.57 s, by the processors of a whole node."""
    asked = {"global_batch": 64, "sequence": 2048}
    here, host = (
        mk.estimate(
            "llama3-8b", mk.Plan(dp=8, zero=1, microbatches=8, precision="bf16", offload=where),
            "8x-h100-nvlink", **asked,
        ).because["optimizer"]
        for where in ("none", "optimizer")
    )  # fmt: skip
    assert host > 2.57 * 8.03 / 10 * 0.9
    assert here < host / 10


def test_again_on_a_machine_that_lost_a_link(advice: Advice) -> None:
    machine = mk.hardware("8x-a100-nvlink")
    slow = replace(machine, link=mk.devices.Link("a slow wire", 1e-5, 1e9))
    then = advice.again(hardware=slow)
    assert then.best is not None
    assert then.best.tp == 1
    assert then.found[0].seconds > advice.found[0].seconds
    with pytest.raises(ValueError, match="there is none"):
        advice.again(hardware="8x-a1000")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch": 0}, "global_batch=0"),
        ({"sequence": 1.5}, "sequence=1.5"),
        ({"model": "llama9"}, "no known model"),
        ({"hardware": "x"}, "there is none"),
    ],
)
def test_mistakes_are_explained(change: dict[str, object], words: str) -> None:
    given = {"model": "llama3-8b", "hardware": "8x-a100-nvlink", "global_batch": 8, "sequence": 4096}
    with pytest.raises(ValueError, match=words):
        mk.advise(**{**given, **change})  # type: ignore[arg-type]


def test_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "advise",
            "--model",
            "llama3-8b",
            "--hardware",
            "8x-a100-nvlink",
            "--global-batch",
            "64",
            "--sequence",
            "4096",
        ]
    )
    assert "plans considered" in capsys.readouterr().out


def test_the_cheapest_and_the_fewest_devices() -> None:
    asked = {"global_batch": 64, "sequence": 4096}
    fast = mk.advise("llama3-8b", "8x-a100-nvlink", **asked)
    cheap = mk.advise("llama3-8b", "8x-a100-nvlink", by="cost", price=2.0, **asked)
    few = mk.advise("llama3-8b", "8x-a100-nvlink", by="devices", **asked)
    assert fast.best is not None
    assert cheap.best is not None
    assert few.best is not None
    costs = [found.seconds * found.layout.ranks / 3600 * 2.0 for found in cheap.found]
    assert costs == sorted(costs)
    assert costs[0] <= fast.found[0].seconds * 8 / 3600 * 2.0
    assert f"{costs[0]:.4g} per step on {cheap.best.ranks} of 8 devices" in str(cheap)
    assert few.best.ranks == min(found.layout.ranks for found in cheap.found)
    assert {found.layout.ranks for found in few.found} == {few.best.ranks}
    assert "the fewest that it fits" in str(few)
    assert f"uses 8 devices, where {few.best.ranks} are enough" in few.why_not(fast.best)
    dear = max(cheap.found[:20], key=lambda found: found.seconds * found.layout.ranks)
    assert re.search(r"a step costs [\d.]+, [\d.]+ % more", cheap.why_not(plan_of(dear.layout)))
    with pytest.raises(ValueError, match=r"by='speed'.*'cost'"):
        mk.advise("llama3-8b", "8x-a100-nvlink", by="speed", **asked)
    with pytest.raises(ValueError, match="price=-1"):
        mk.advise("llama3-8b", "8x-a100-nvlink", by="cost", price=-1, **asked)
    with pytest.raises(ValueError, match="counts for by='cost' alone"):
        mk.advise("llama3-8b", "8x-a100-nvlink", price=1.0, **asked)

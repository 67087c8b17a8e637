"""What the advice says, and that its sentences can be checked."""

import re
import warnings
from dataclasses import replace
from html import unescape
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpkit as mk
from mpkit.common.display import draw
from mpkit.common.safe_text import escape
from mpkit.devices.hardware import Hardware
from mpkit.plan.kinds import every as one_of
from mpkit.prediction.advice import search
from mpkit.prediction.advice.advice import Advice
from mpkit.prediction.advice.search import HEADROOM, FoundLayout, find_best, handicap_of, plan_under
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.estimate import estimate_of
from mpkit.prediction.cost_model.known_models import known_models
from mpkit.prediction.cost_model.layout import plan_of
from mpkit.prediction.cost_model.preset import preset_for
from mpkit.prediction.cost_model.stack import stack_of, stacks
from mpkit.prediction.cost_model.workload import Workload
from tests.words import unwrapped


@pytest.fixture(scope="module")
def advice() -> Advice:
    return mk.advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)


def test_it_names_the_best_plan_with_its_numbers(advice: Advice) -> None:
    told = unwrapped(advice)
    assert advice.best is not None
    best = mk.estimate("llama3-8b", advice.best, "8x-a100-nvlink", global_batch=64, sequence=4096)
    assert repr(advice.best) in told
    assert f"{best.step_time:.2f} s per step" in told
    assert f"{advice.considered:,} plans considered" in told
    assert advice.considered > 5000
    assert all(f"- {rule.says} The search" in told for rule in advice.rules)
    assert max(map(len, str(advice).splitlines())) <= 96


def test_plans_and_the_frontier_are_ordered(advice: Advice) -> None:
    plans = [advice.estimate(plan) for plan in advice.plans]
    assert [each.step_time for each in plans] == sorted(each.step_time for each in plans)
    assert all(each.needed <= 0.92 * each.available for each in plans)
    frontier = [advice.estimate(plan) for plan in advice.frontier]
    assert [each.step_time for each in frontier] == sorted(each.step_time for each in frontier)
    assert [each.peak_memory for each in frontier] == sorted(
        (each.peak_memory for each in frontier), reverse=True
    )


def test_a_notebook_shows_words_a_row_per_family_and_a_chart() -> None:
    """P8: a row says what a further part gains, near twins are one row, and no amount breaks over two lines."""
    advice = _advised(("llama3-70b", "4x8-h100-ib", 512))
    words, table, chart = draw(advice, "parts")
    assert escape(repr(advice.best)) in unwrapped(words.data)
    plans = re.findall(r"<td [^>]*>(Plan\(.*?\))</td>", unescape(table.data))
    assert plans == [repr(family.plan) for family in advice.families]
    assert "the simplest within 5 %" in table.data
    cells = re.findall(r"<td ([^>]*)>(.*?)</td>", unescape(table.data))
    assert all("white-space:nowrap" in style for style, words in cells if not words.startswith("Plan("))
    ticks = advice.figure().layout.xaxis.ticktext
    assert len(ticks) > 2 and all(words == "0" or words.endswith("GiB") for words in ticks)
    assert chart.data == advice.figure().data
    kinds = [replace(plan, microbatches=1) for plan in advice.plans]
    assert len({repr(plan) for plan in kinds}) == len(kinds)


@pytest.mark.slow
def test_the_layout_of_a_405b_run_is_found() -> None:
    """P1: 126 layers on 16,384 GPUs: neither uneven stages nor recomputation of every k-th layer was searched."""
    machine = mk.hardware("h100", nodes=2048, nic="ndr")
    advice = mk.advise("llama3-405b", machine, global_batch=2048, sequence=8192, stack="megatron")
    assert advice.best is not None and advice.best.tp <= 8
    published = {
        "pp": 16, "schedule": "interleaved_1f1b", "virtual_stages": 7, "zero": 1, "precision": "bf16",
    }  # fmt: skip
    for degrees in ({"tp": 8, "dp": 128, "recompute": "every=2"}, {"tp": 16, "dp": 64}):
        plan = mk.Plan(**published, **degrees, microbatches=2048 // degrees["dp"], sequence_parallel=True)  # type: ignore[arg-type, operator]
        assert advice.estimate(plan) and advice.step_time <= advice.estimate(plan).step_time
        assert "longer than" in advice.why_not(plan)
    assert "--pipeline-model-parallel-layout" in unwrapped(advice)


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


@pytest.mark.parametrize(("change", "words"), [
    ({"global_batch": 0}, "global_batch=0"),
    ({"sequence": 1.5}, "sequence=1.5"),
    ({"model": "llama9"}, "no known model"),
    ({"hardware": "x"}, "there is none"),
])  # fmt: skip
def test_mistakes_are_explained(change: dict[str, object], words: str) -> None:
    given = {"model": "llama3-8b", "hardware": "8x-a100-nvlink", "global_batch": 8, "sequence": 4096}
    with pytest.raises(ValueError, match=words):
        mk.advise(**{**given, **change})  # type: ignore[arg-type]


def test_the_cheapest_and_the_fewest_devices() -> None:
    asked = {"global_batch": 64, "sequence": 4096}
    fast = mk.advise("llama3-8b", "8x-a100-nvlink", **asked)
    cheap = mk.advise("llama3-8b", "8x-a100-nvlink", by="cost", price=2.0, **asked)
    few = mk.advise("llama3-8b", "8x-a100-nvlink", by="devices", **asked)
    assert fast.best is not None
    assert cheap.best is not None
    assert few.best is not None
    costs = [found.seconds * found.layout.ranks / 3600 * 2.0 for found in cheap.found]
    handicaps = (handicap_of(cheap.asked, each.layout.offload) for each in cheap.found[:25])
    compared = [cost * handicap for cost, handicap in zip(costs, handicaps, strict=False)]
    assert compared == sorted(compared)
    assert costs[0] <= fast.found[0].seconds * 8 / 3600 * 2.0
    assert f"{costs[0]:.4g} per step on {cheap.best.ranks} of 8 devices" in str(cheap)
    assert few.best.ranks == min(found.layout.ranks for found in cheap.found)
    assert {found.layout.ranks for found in few.found} == {few.best.ranks}
    assert "the fewest that it fits" in str(few)
    assert f"uses 8 devices, where {few.best.ranks} are enough" in few.why_not(fast.best)
    dear = max(cheap.found[:20], key=lambda found: found.seconds * found.layout.ranks)
    assert re.search(
        r"a step costs [\d.]+, [\d.]+ % more", cheap.why_not(plan_under(cheap.asked, dear.layout))
    )
    with pytest.raises(ValueError, match=r"by='speed'.*'cost'"):
        mk.advise("llama3-8b", "8x-a100-nvlink", by="speed", **asked)
    with pytest.raises(ValueError, match="price=-1"):
        mk.advise("llama3-8b", "8x-a100-nvlink", by="cost", price=-1, **asked)
    with pytest.raises(ValueError, match="counts for by='cost' alone"):
        mk.advise("llama3-8b", "8x-a100-nvlink", price=1.0, **asked)


ASKED = [
    ("gpt2", "4x-a10g", 64),
    ("gpt2-xl", "8x-v100", 32),
    ("llama3-8b", "8x-rtx-4090", 64),
    ("llama3-70b", "4x8-h100-ib", 512),
    ("qwen3-32b", "2x8-h100-ib", 64),
]
SOME_RECOMPUTED = "recomputation of some layers is --recompute-method=block with the number of them per stage"
RECOMPUTED = "what is recomputed is in code: deepspeed.checkpointing.checkpoint, or the model's own"


def _advised(asked: tuple[str, str, int], stack: str | None = None) -> Advice:
    model, hardware, batch = asked
    sequence = 1024 if model.startswith("gpt2") else 4096
    return mk.advise(model, hardware, global_batch=batch, sequence=sequence, stack=stack)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED)
def test_the_best_plan_leaves_memory_and_its_framework_runs_it(asked: tuple[str, str, int]) -> None:
    advice = _advised(asked)
    if advice.best is None:
        return
    if advice.found[0].memory > HEADROOM * advice.asked.available:
        assert not advice.tight
        assert "no plan leaves more than 8 %" in unwrapped(advice)
    assert advice.best.precision == ("fp16" if "v100" in asked[1] else "bf16")
    for name, reason in advice.runs_in.items():
        if not reason:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                advice.best.to(name)
    for stack in ("torchtitan", "megatron", "deepspeed"):
        there = _advised(asked, stack)
        if (
            there.best is not None and "v100" not in asked[1]
        ):  # on which torchtitan has no precision of 16 bits
            assert there.runs_in[stack] in ("", RECOMPUTED, SOME_RECOMPUTED)


def test_the_guides_rules_on_links() -> None:
    slow = mk.hardware("a100", nodes=4, per_node=8, nic="10gbe")
    said = unwrapped(mk.advise("llama2-13b", slow, global_batch=512, sequence=4096))
    assert "between nodes are slow: a pipeline between nodes, and ZeRO-1 at most. The search agrees" in said
    assert "shard them inside the node. The search agrees" in said
    fast = unwrapped(_advised(("llama3-8b", "8x-a100-nvlink", 64)))
    assert "a pipeline, ZeRO and tensor parallelism do about alike. The search agrees" in fast
    pcie = mk.advise("gpt3-1.3b", "8x-a100-pcie", global_batch=64, sequence=1024)
    assert "Links of 24.8 GB/s are slow" in unwrapped(pcie)


# ---- The search finds the best plan there is, and better hardware never makes it worse.

MODELS = {
    "dense": Architecture(10, 2048, 16, kv_heads=4, ffn=5504, vocabulary=32_000, gated=True),
    "experts": replace(known_models()["deepseek-v2"], layers=6, dense=1),
    "tied": Architecture(12, 768, 12, vocabulary=50_257, positions=2048, tied=True, bias=True),
}
GIB = 2**30


def machine(memory: float, nodes: int = 1, per_node: int = 4) -> Hardware:
    found = mk.hardware("a100", nodes=nodes, per_node=per_node, nic="hdr" if nodes > 1 else None)
    return replace(found, device=replace(found.device, memory=int(memory * GIB)))


def asked_for(name: str, hardware: Hardware, stack: str = "pytorch", batch: int = 8) -> Workload:
    preset = preset_for(hardware.device.name, stack)
    return Workload(MODELS[name], hardware, stack_of(stack), preset, batch, sequence=2048)


def every(asked: Workload) -> list[FoundLayout]:
    """All layouts that fit, by trying each with each relief, and the memory of all stages."""
    found = []
    offers = search.offers_of(asked.stack.name)
    for base, sizes in search.families(asked, asked.hardware.devices):
        for size, offload, recompute in product(sizes, offers.offload, offers.recompute):
            if offload == "params" and base.zero < 3:
                continue
            if one_of(recompute) > asked.model.layers:
                continue
            parts = asked.global_batch // base.dp // size
            this = replace(base, microbatch=size, microbatches=parts, offload=offload, recompute=recompute)
            guess = estimate_of(asked, plan_of(this))
            if guess:
                found.append(FoundLayout(this, guess.step_time, guess.needed))
    return sorted(found, key=lambda each: each.seconds * handicap_of(asked, each.layout.offload))


@pytest.mark.parametrize(
    ("name", "memory", "stack"), [("tied", 3, "pytorch"), ("experts", 12, "megatron-2021")]
)
def test_the_best_is_best_by_exhaustive_evaluation(name: str, memory: float, stack: str) -> None:
    asked = asked_for(name, machine(memory), stack)
    best, full, considered = find_best(asked)
    tried = every(asked)
    alike = [each for each in tried if asked.stack.fused and each.layout.recompute == "selective"]
    assert considered >= len(tried) - len(alike)  # fused attention has no scores to compute again
    roomy = [each for each in tried if each.memory <= 0.92 * asked.hardware.device.memory]
    assert bool(best) == bool(roomy)
    if roomy:
        assert best[0].seconds == roomy[0].seconds
        smallest = min(roomy, key=lambda each: each.memory)
        assert any(each.memory <= smallest.memory or each.seconds <= smallest.seconds for each in best)
    elif tried:
        assert full[0].seconds == tried[0].seconds


@given(
    name=st.sampled_from(sorted(MODELS)), memory=st.floats(2, 40), more=st.floats(1, 4), faster=st.floats(1, 8),
    stack=st.sampled_from(sorted(stacks())), nodes=st.sampled_from([1, 2]),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_more_memory_or_bandwidth_never_makes_the_best_plan_slower(
    name: str, memory: float, more: float, faster: float, stack: str, nodes: int
) -> None:
    here = machine(memory, nodes, per_node=2)
    larger = replace(here, device=replace(here.device, memory=int(here.device.memory * more)))
    quicker = replace(here, link=replace(here.link, bandwidth=here.link.bandwidth * faster, bus={
        kind: rate * faster for kind, rate in here.link.bus.items()
    }))  # fmt: skip
    took = []
    for each in (here, larger, quicker):
        asked = asked_for(name, each, stack, batch=4)
        best = find_best(asked)[0][:1]
        took += [found.seconds * handicap_of(asked, found.layout.offload) for found in best] or [float("inf")]
    assert max(took[1:]) <= took[0] * (1 + 1e-12)

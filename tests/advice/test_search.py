"""The search finds the best plan there is, and better hardware never makes it worse."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpkit as mk
from mpkit.devices.hardware import Hardware
from mpkit.plan.kinds import every as one_of
from mpkit.plan.schedule import Schedule
from mpkit.plan.schedule.catalogue import SCHEDULES, has_pairs
from mpkit.prediction.advice.advice import find_advice
from mpkit.prediction.advice.objective import TIME
from mpkit.prediction.advice.offers import offers_of
from mpkit.prediction.advice.prices import LayoutPrices
from mpkit.prediction.advice.screening import HELD, PARTS
from mpkit.prediction.advice.search import FoundLayout, columns_of, kinds_of, search
from mpkit.prediction.advice.space import TrainingQuestion, families
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.estimate import estimate_checked
from mpkit.prediction.cost_model.known_models import known_models
from mpkit.prediction.cost_model.layout import plan_of
from mpkit.prediction.cost_model.memory import FRAGMENTATION
from mpkit.prediction.cost_model.preset import preset_for
from mpkit.prediction.cost_model.stack import STACKS, stack_of

MODELS = {
    "dense": Architecture(10, 2048, 16, kv_heads=4, ffn=5504, vocabulary=32_000, gated=True),
    "experts": replace(known_models()["deepseek-v2"], layers=6, dense=1),
    "tied": Architecture(12, 768, 12, vocabulary=50_257, positions=2048, tied=True, bias=True),
}
GIB = 2**30


def machine(memory: float, nodes: int = 1, per_node: int = 4) -> Hardware:
    found = mk.hardware("a100", nodes=nodes, per_node=per_node, nic="hdr" if nodes > 1 else None)
    return replace(found, device=replace(found.device, memory=int(memory * GIB)))


def priced(
    name: str, hardware: Hardware, stack: str = "pytorch", batch: int = 8, sequence: int = 2048
) -> LayoutPrices:
    return LayoutPrices(
        TrainingQuestion(MODELS[name], batch, sequence),
        hardware,
        stack_of(stack),
        preset_for(hardware.device.name, stack),
    )


def every(asked: LayoutPrices) -> list[FoundLayout]:
    """All layouts that fit, by trying each with each relief, and the memory of all stages."""
    found = []
    offers = offers_of(asked.stack.name)
    for family in families(asked.asked, asked.hardware.devices, asked.hardware.per_node, offers):
        for layout, offload, recompute in product(family, offers.offload, offers.recompute):
            if offload == "params" and layout.zero < 3:
                continue
            if one_of(recompute) > asked.asked.model.layers:
                continue
            this = replace(layout, offload=offload, recompute=recompute)
            guess = mk.estimate(
                asked.asked.model, plan_of(this), asked.hardware, global_batch=asked.asked.global_batch,
                sequence=asked.asked.sequence, stack=asked.stack, preset=asked.preset,
            )  # fmt: skip
            memory = guess.peak_memory * (1 + FRAGMENTATION)
            if memory <= asked.hardware.device.memory:
                found.append(FoundLayout(this, guess.step_time, memory))
    return sorted(found, key=lambda each: each.seconds * asked.handicap(each.layout))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("memory", [3, 12])
@pytest.mark.parametrize("stack", ["pytorch", "megatron-2021"])
def test_the_best_is_best_by_exhaustive_evaluation(name: str, memory: float, stack: str) -> None:
    asked = priced(name, machine(memory), stack)
    searched = TIME.search(asked)
    tried = every(asked)
    alike = [each for each in tried if asked.stack.fused and each.layout.recompute == "selective"]
    assert searched.considered >= len(tried) - len(alike)  # fused attention has no scores to compute again
    roomy = [each for each in tried if each.memory <= 0.92 * asked.hardware.device.memory]
    assert bool(searched.found) == bool(roomy)
    if roomy:
        assert searched.found[0].seconds == roomy[0].seconds
        smallest = min(roomy, key=lambda each: each.memory)
        smaller = (
            each.memory <= smallest.memory or each.seconds <= smallest.seconds for each in searched.found
        )
        assert any(smaller)
    elif tried:
        assert searched.tight[0].seconds == tried[0].seconds


@given(
    name=st.sampled_from(sorted(MODELS)),
    memory=st.floats(2, 40),
    more=st.floats(1, 4),
    faster=st.floats(1, 8),
    stack=st.sampled_from(sorted(STACKS)),
    nodes=st.sampled_from([1, 2]),
)
@settings(max_examples=25, deadline=None)
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
        asked = priced(name, each, stack, batch=4)
        best = TIME.search(asked).found[:1]
        took += [found.seconds * asked.handicap(found.layout) for found in best] or [float("inf")]
    assert max(took[1:]) <= took[0] * (1 + 1e-12)


CHANGES: dict[str, list[Any]] = {
    "schedule": list(SCHEDULES), "virtual_stages": [1, 2, 3, 4], "zero": [0, 1, 2, 3],
    "offload": ["none", "optimizer", "params"], "recompute": ["none", "selective", "full", "every=2"],
    "cp_method": ["ring", "ulysses"], "cp_order": ["contiguous", "zigzag"], "sequence_parallel": [False, True],
    "ep": [1, 2, 4, 8], "etp": [1, 2, 4], "dp_shard": [None, 2, 4],
}  # fmt: skip


def change_plan(draw: random.Random, plan: mk.Plan) -> mk.Plan | None:
    """Change up to three fields of a plan, or move a factor of two from one degree to another; None: no such plan."""
    changed: dict[str, Any] = {}
    for _ in range(draw.choice([1, 1, 2, 3])):
        name = draw.choice(["degrees", "degrees", "microbatches", *CHANGES])
        if name == "degrees":
            less, more = draw.sample(["pp", "dp", "tp", "cp"], 2)
            have = {axis: changed.get(axis, getattr(plan, axis)) for axis in (less, more)}
            if have[less] % 2 == 0:
                changed |= {less: have[less] // 2, more: have[more] * 2}
        elif name == "microbatches":
            changed[name] = max(1, int(plan.microbatches * draw.choice([0.25, 0.5, 2, 4])))
        else:
            changed[name] = draw.choice(CHANGES[name])
    try:
        return replace(plan, **changed)
    except ValueError:
        return None


ASKED: dict[str, tuple[Any, Any, int, int]] = {
    "gpt2-xl": ("gpt2-xl", "2x8-h100-ib", 64, 1024),
    **{name: (model, machine(40, nodes=2), 32, 2048) for name, model in MODELS.items()},
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("stack", ["pytorch", "deepspeed"])
def test_no_plan_beside_the_best_is_better(name: str, stack: str) -> None:
    """Plans by what a Plan can say, and not by what the search tries; estimates of pipelines are within 0.5 %."""
    draw = random.Random(f"{name} {stack}")
    model, hardware, batch, sequence = ASKED[name]
    advice = mk.advise(model, hardware, global_batch=batch, sequence=sequence, stack=stack)
    pool, tried = [advice.plans[0]], 0
    while tried < 120:
        plan = change_plan(draw, draw.choice(pool))
        if plan is None:
            continue
        tried += 1
        why = advice.why_not(plan)
        if "cannot work" not in why and len(pool) < 12:
            pool.append(plan)
        if "as good as any" in why:
            assert advice.estimate(plan).step_time >= 0.995 * advice.found[0].seconds, (plan, advice.best)


def test_long_sequences_are_shared_by_heads_where_ranks_can_divide_them() -> None:
    """16 heads of queries and 4 of keys: 8 ranks divide them, and 6 do not."""
    methods = {
        devices: {
            each.layout.cp_method
            for each in TIME.search(priced("dense", machine(80, 1, devices), batch=1, sequence=24_576)).found
            if each.layout.cp == devices
        }
        for devices in (6, 8)
    }
    assert methods == {6: {"ring"}, 8: {"ring", "ulysses"}}
    # Of a model whose queries share no keys; a ring passes those of Llama 3, a quarter, faster.
    advice = mk.advise("llama2-7b", "8x8-h100-ndr", global_batch=8, sequence=65_536)
    assert advice.best is not None and (advice.best.cp, advice.best.cp_method) == (8, "ulysses")
    assert "longer" in advice.why_not(replace(advice.best, cp_method="ring", cp_order="zigzag"))


def test_plans_that_are_found_can_be_made_and_cost_what_was_found() -> None:
    asked = priced("dense", machine(6))
    advice = find_advice(asked.asked, asked.hardware, asked.stack, asked.preset)
    for plan, found in zip(advice.plans, kinds_of(advice.found), strict=False):
        guess = advice.estimate(plan)
        assert guess.step_time == pytest.approx(found.seconds, rel=1e-12)
        assert guess.peak_memory * (1 + FRAGMENTATION) == pytest.approx(found.memory, rel=1e-12)


@pytest.mark.parametrize("stack", ["pytorch", "megatron", "torchtitan", "deepspeed", "nanotron"])
@pytest.mark.parametrize("name", MODELS)
def test_screened_layouts_have_the_memory_and_the_time_of_their_estimates(name: str, stack: str) -> None:
    """Time is exact without a pipeline; with one, a formula stands for it."""
    asked = priced(name, machine(40, nodes=2), stack, batch=16)
    found, tight, considered = search(asked, asked.hardware.devices)
    assert len(found) + len(tight) <= considered
    for place in range(0, len(found), max(1, len(found) // 40)):
        each = found[place]
        guess = estimate_checked(
            asked.asked.model, asked.plan_of(each.layout), asked.hardware, 16, 2048, asked.stack, asked.preset
        )
        assert each.memory == pytest.approx(guess.peak_memory * (1 + FRAGMENTATION), rel=1e-12)
        if each.layout.pp == 1:
            assert each.seconds == pytest.approx(guess.step_time, rel=1e-9)
        else:
            assert 0.9 < each.seconds / guess.step_time < 1.2


def test_experts_are_folded_and_hybrid_where_the_software_can_do_that() -> None:
    """ep counts the ranks along tp; torchtitan has all of cp and tp among them, nanotron and DeepSpeed no experts."""
    ways = {}
    for stack in ("pytorch", "megatron", "torchtitan", "deepspeed", "llm-foundry"):
        asked = priced("experts", machine(80, nodes=2), stack)
        of = [each.base for each in families(asked.asked, 8, 4, offers_of(stack))]
        folded = any(each.ep > each.shards for each in of)
        ways[stack] = folded, any(each.sharded for each in of)
        assert all(stack != "torchtitan" or each.ep % (each.cp * each.tp) == 0 for each in of if each.ep > 1)
    assert ways == {
        "pytorch": (True, True), "megatron": (True, True), "torchtitan": (True, True),
        "deepspeed": (False, True), "llm-foundry": (False, True),
    }  # fmt: skip


def test_a_models_whole_experts_are_priced_whole() -> None:
    """Beside tp without ep a GPT's experts are whole, where PyTorch runs it, and divided where Megatron does."""
    model = {"layers": 4, "hidden": 512, "heads": 8, "experts": 8, "top_k": 2, "vocabulary": 1000}
    beside = {}
    for stack in ("pytorch", "megatron"):
        advice = mk.advise(
            model | {"whole_experts": True}, "8x-a100-nvlink", global_batch=8, sequence=512, stack=stack
        )
        beside[stack] = {each.layout.alike for each in advice.found if each.layout.tp > 1 == each.layout.ep}
        best = mk.estimate(
            model | {"whole_experts": True},
            advice.plans[0],
            "8x-a100-nvlink",
            global_batch=8,
            sequence=512,
            stack=stack,
        )
        assert best.step_time == pytest.approx(advice.found[0].seconds, rel=1e-9)
    assert beside == {"pytorch": {True}, "megatron": {False}}


def test_large_mixtures_are_advised_in_seconds_of_cpu() -> None:
    """A bound on work: of the layers of 400,000 layouts and more each kind is priced once."""
    asked = LayoutPrices(
        TrainingQuestion(known_models()["mixtral-8x7b"], 256, 4096), mk.hardware("8x8-h100-ndr"), stack_of("pytorch"),
        preset_for("H100 SXM", "pytorch"),
    )  # fmt: skip
    columns = columns_of(asked, 64, offers_of("pytorch"))
    kinds = [columns.distinct(*PARTS, "cp_method", microbatch=True)[1], columns.distinct(*HELD)[1]]
    assert len(columns.base) > 80_000 and sum(map(len, kinds)) < 6_000


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_every_way_to_divide_experts_over_ranks_is_tried(name: str) -> None:
    """ep, with whole experts along tp or a part of each: all that a Plan and the model allow."""
    model, (batch, length) = MODELS[name], (8, 2048)
    degrees = "dp", "cp", "tp", "ep", "etp"
    tried = set()
    for family in families(TrainingQuestion(model, batch, length), 8, 8):
        if family.base.pp == 1:
            plan = plan_of(family.base)
            tried.add(tuple(getattr(plan, axis) for axis in degrees))
    allowed = set()
    for dp, cp, tp, ep in product((1, 2, 4, 8), repeat=4):
        for etp in {1, tp} if dp * cp * tp == 8 else ():
            try:
                plan = mk.Plan(dp=dp, cp=cp, tp=tp, ep=ep, etp=etp, sequence_parallel=tp > 1)
                mk.estimate(model, plan, "8x-a100-nvlink", global_batch=batch, sequence=length)
            except ValueError:
                continue
            allowed.add((dp, cp, tp, ep, plan.etp))
    assert tried == allowed
    assert {etp for *_, etp in allowed} == ({None, 1, 2, 4} if name == "experts" else {None})


@pytest.mark.parametrize("stack", ["pytorch", "megatron", "torchtitan"])
def test_pairs_are_advised_where_they_hide_much(stack: str) -> None:
    """Tokens travel between nodes; torchtitan does not hide them, and Megatron recomputes no pair in full."""
    asked = priced("experts", machine(40, nodes=4), stack, batch=64)
    found = TIME.search(asked).found
    joint = [each for each in found if has_pairs(each.layout.schedule)]
    assert (found[0] in joint) == (stack != "torchtitan")
    assert bool(joint) == (stack != "torchtitan")
    assert all(each.layout.ep > 1 for each in joint)
    recomputed = {each.layout.recompute for each in joint}
    assert ("full" in recomputed) == (stack == "pytorch")
    for each in joint[:5]:
        guess = mk.estimate(
            asked.asked.model,
            plan_of(each.layout),
            asked.hardware,
            global_batch=64,
            sequence=2048,
            stack=stack,
        )
        apart = Schedule(
            plan_of(each.layout).build().rows, "apart", plan_of(each.layout).build().stage_to_rank
        )
        alone = mk.estimate(
            asked.asked.model, replace(plan_of(each.layout), schedule=apart, virtual_stages=1), asked.hardware,
            global_batch=64, sequence=2048, stack=stack,
        )  # fmt: skip
        assert guess.step_time == pytest.approx(each.seconds, rel=1e-9)
        assert guess.step_time < alone.step_time

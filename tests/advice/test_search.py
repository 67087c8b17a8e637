"""The search finds the best plan there is, and better hardware never makes it worse."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpkit as mk
from mpkit.devices.hardware import Hardware
from mpkit.plan.kinds import every as one_of
from mpkit.prediction.advice.search import TIME, FoundLayout, LayoutPrices
from mpkit.prediction.advice.space import TrainingQuestion, families, offers_of
from mpkit.prediction.cost_model.architecture import Architecture
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


@pytest.mark.parametrize(
    ("name", "memory", "stack"),
    [("tied", 3, "pytorch"), ("experts", 12, "megatron-2021")],
)
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
        asked = priced(name, each, stack, batch=4)
        best = TIME.search(asked).found[:1]
        took += [found.seconds * asked.handicap(found.layout) for found in best] or [float("inf")]
    assert max(took[1:]) <= took[0] * (1 + 1e-12)

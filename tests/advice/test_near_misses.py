"""What stands against the plans beside the best one, and what it costs to move to another."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.common.units import memory_text
from mpkit.prediction.advice.advice import Advice
from mpkit.prediction.advice.resharding import resharding_bytes
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.stack import Stack

MODEL = Architecture(4, 8, 2, ffn=16, vocabulary=16)


@pytest.fixture(scope="module")
def advice() -> Advice:
    return mk.advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)


def check_near_misses(advice: Advice) -> None:
    """Compare each near miss with the estimate of its plan."""
    room = advice.priced.room
    for miss in advice.near_misses:
        guess = advice.estimate(advice.priced.plan_of(miss.layout))
        assert guess.step_time == pytest.approx(miss.seconds, rel=1e-9)
        assert advice.fullest_bytes(guess) - room == pytest.approx(miss.excess, rel=1e-6)
        assert (miss.seconds < advice.found[0].seconds) == (miss.excess > 0)


def test_each_near_miss_is_what_the_estimate_says(advice: Advice) -> None:
    assert {miss.excess > 0 for miss in advice.near_misses} == {True, False}
    check_near_misses(advice)


@pytest.mark.parametrize(("machine", "samples"), [("4x-a10g", 64), ("8x-rtx-4090", 128)])
def test_near_misses_of_a_plan_that_offloads(machine: str, samples: int) -> None:
    advice = mk.advise("qwen3-32b", machine, global_batch=samples, sequence=4096)
    assert advice.best.offload == "params"
    check_near_misses(advice)


def test_the_sentences_name_what_is_missing(advice: Advice) -> None:
    text = str(advice)
    out = next(miss for miss in advice.near_misses if miss.change == "zero=2")
    beyond = out.excess + advice.priced.room - advice.priced.hardware.device.memory
    assert f"Near miss, zero=2: out by {memory_text(beyond)}" in text
    slow = mk.advise("llama3-8b", "8x-rtx-4090", global_batch=64, sequence=4096)
    assert any("communication that nothing hides" in miss.why for miss in slow.near_misses)


def test_again_says_what_changed_and_what_moves(advice: Advice) -> None:
    lost = advice.again(hardware="4x-a100-nvlink")
    assert lost.before is advice
    assert len(lost.moved) == 4
    assert sum(lost.moved) > 0
    assert f"ranks fetch {memory_text(sum(lost.moved))}" in str(lost)
    assert repr(advice.best) in lost.change
    same = advice.again(hardware="8x-a100-nvlink")
    assert not any(same.moved)
    assert "every rank holds what it needs" in str(same)
    assert advice.change == ""


def held(layout: Layout, rank: int, states: bool, parts: int) -> set[tuple[int, int]]:
    """The (piece, part) pairs of a rank, where each piece is cut into equal parts."""
    mesh = list(product(range(layout.pp), range(layout.dp), range(layout.cp), range(layout.tp)))
    stage, d, c, t = mesh[rank]
    counts = layout.stage_layers(MODEL.layers)
    pieces = {1 + sum(counts[:stage]) + i for i in range(counts[stage])}
    pieces |= ({0} if stage == 0 else set()) | ({MODEL.layers + 1} if stage == layout.pp - 1 else set())
    mine = range(t * parts // layout.tp, (t + 1) * parts // layout.tp)
    if layout.zero >= (1 if states else 3):
        n, k = layout.replicas, d * layout.cp + c
        mine = mine[k * len(mine) // n : (k + 1) * len(mine) // n]
    return {(piece, part) for piece in pieces for part in mine}


LAYOUTS = st.builds(
    Layout,
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
)


@given(LAYOUTS, LAYOUTS)
def test_what_is_fetched_is_what_is_missing_part_by_part(before: Layout, after: Layout) -> None:
    stack, parts = Stack("test"), 64
    layer = MODEL.layer_parameters(0)
    sizes = [MODEL.embedding_parameters, *[layer] * MODEL.layers, MODEL.head_parameters]
    counted = []
    for rank in range(after.ranks):
        missing = 0.0
        for each, states in ((stack.element, False), (stack.states, True)):
            had = held(before, rank, states, parts) if rank < before.ranks else set()
            missing += sum(each * sizes[piece] / parts for piece, _ in held(after, rank, states, parts) - had)
        counted.append(missing)
    assert resharding_bytes(MODEL, before, after, stack) == pytest.approx(counted)

"""Schedules on the clock, against the figures of the papers that introduced them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.trace import Kind


def test_gpipe_of_4_stages_and_8_micro_batches() -> None:
    """Huang et al. 2019, section 2.3: F=1, B=2: span 3 (m + p - 1) = 33, idle 3 (p - 1) = 9."""
    t = mk.simulate(mk.Plan.gpipe(4, 8))
    assert t.step_time == 33.0
    assert t.idle == [9.0] * 4
    assert t.busy == [24.0] * 4
    assert t.bubble == pytest.approx(3 / 11)
    assert t.ideal_bubble == pytest.approx(3 / 8)  # Megatron's: (p - 1)/m
    assert t.bubble_of(0) == t.bubble
    assert t.bubble_of(0, ideal=True) == t.ideal_bubble
    assert t.clock == "simulated"
    assert t.steps == [0]
    assert [peak["activations"] for peak in t.peak_memory] == [8] * 4


@given(p=st.integers(1, 6), m=st.integers(1, 8), hop=st.integers(0, 12).map(lambda n: n / 4))
def test_hops_are_on_the_critical_path_of_gpipe_once_there_and_once_back(p: int, m: int, hop: float) -> None:
    """Messages are asynchronous, so only the first on its way there and the last on its way back are waited for."""
    t = mk.simulate(mk.Plan.gpipe(p, m), hop=hop)
    assert t.step_time == pytest.approx(3 * (m + p - 1) + 2 * (p - 1) * hop)


def test_split_backwards_let_the_stage_before_go_on() -> None:
    """Qi et al. 2023: what the stage before waits for is I alone."""
    whole = mk.Plan.from_schedule(["0F0 0B0", "1F0 1B0"])
    split = mk.Plan.from_schedule(["0F0 0I0 0W0", "1F0 1I0 1W0"])
    assert mk.simulate(whole, 1, 3, 2).step_time == 1 + 1 + 5 + 5
    t = mk.simulate(split, 1, 3, 2)
    assert t.step_time == 1 + 1 + 3 + 5
    # Activations live until W is done.
    assert t.peak_memory[1]["activations"] == 1
    last = t.held[t.held["rank"] == 1][-1]
    assert (last["time"], last["total"]) == (7.0, 0)


def test_recomputation_does_the_forward_again() -> None:
    # 3 F until the last stage begins, 8 (F + R + B) there, 3 B until the first one ends: the other R's come
    # while a rank waits for its gradient anyway (Huang et al. 2019, section 2.3).
    plan = mk.Plan.gpipe(4, 8, recompute="full")
    t = mk.simulate(plan)
    assert t.step_time == 3 + 8 * 4 + 3 * 2
    assert t.bubble == pytest.approx(9 / 41)
    assert (t.spans["kind"] == Kind.RECOMPUTE).sum() == 4 * 8


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"forward": [1, 2]}, r"2 times for 4 stages.*forward=\[1.0, 1.0, 1.0, 1.0\]"),
        ({"weight_grad": -1.0}, "weight_grad=-1.0.*not negative"),
        ({"hop": float("inf")}, "hop=inf.*finite"),
        ({"input_grad": float("nan")}, "input_grad=nan"),
        ({"forward": "fast"}, "forward='fast'.*a number of seconds"),
        ({"forward": None}, "forward=None"),
        ({"forward": [1, 1, 1, "x"]}, "forward='x'"),
        ({"hop": True}, "hop=True"),
    ],
)
def test_times_that_cannot_be(times: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mk.simulate(mk.Plan.gpipe(4, 8), **times)


def test_zb_h2_pays_where_steps_follow_each_other() -> None:
    """Qi et al. 2024, section 4: no rank waits for others between two steps, and H2's have no bubble of their own."""
    h1, h2, flushed = (mk.simulate(mk.Plan.pipeline(n, 4, 8), steps=5) for n in ("zb_h1", "zb_h2", "1f1b"))
    assert h2.spans["end"].max() == 5 * 24 + 3
    assert h2.step_time == 27
    assert h1.spans["end"].max() == 5 * 24 + 3 * 5
    assert flushed.spans["end"].max() == 5 * 24 + 9 * 5
    assert h2.steps == [0, 1, 2, 3, 4]
    assert set(h2.spans["microbatch"].tolist()) == {-1, *range(8)}
    one = mk.simulate(mk.Plan.pipeline("zb_h2", 4, 8))
    assert h2.step(0).step_time == one.step_time
    assert [peak["activations"] for peak in h2.peak_memory] == [7] * 4
    with pytest.raises(ValueError, match=r"steps=0.*such as steps=3"):
        mk.simulate(mk.Plan.gpipe(2, 2), steps=0)


def test_a_backward_that_is_not_split_may_take_less_than_its_halves() -> None:
    """DualPipeV has both kinds; the times of a simulation are found again in it, and give it again."""
    plan = mk.Plan.pipeline("dualpipev", 4, 8)
    t = mk.simulate(plan, 1.0, 1.5, 1.0, backward=2.0, hop=0.1)
    times = t.stage_times()
    assert times["backward"] == pytest.approx([2.0] * 8)
    assert times["input_grad"] == pytest.approx([1.5] * 8)
    assert mk.simulate(plan, **times).step_time == pytest.approx(t.step_time)
    assert t.step_time < mk.simulate(plan, 1.0, 1.5, 1.0, hop=0.1).step_time
    assert mk.simulate(mk.Plan.gpipe(2, 2), backward=5).step_time == (2 + 2 - 1) * (1 + 5)
    with pytest.raises(ValueError, match=r"backward=\[1.0, 2.0\] names 2 times for 4 stages"):
        mk.simulate(mk.Plan.gpipe(4, 8), backward=[1, 2])

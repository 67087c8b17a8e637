"""The schedules of the literature, against the figures of their papers and against PyTorch's."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpkit import Plan
from mpkit.plan.schedule import NAMES, Schedule, build_schedule, lower, play, validate
from mpkit.plan.schedule.catalogue import SCHEDULES, bubble_in_theory
from tests.schedule.test_schedule import check_messages, run_in_order


class Figures(NamedTuple):
    span: float
    idle: list[float]  # by rank, of the whole span
    own_idle: list[float]  # by rank, from its own first action to its own last
    peak: list[int]  # by rank, live activations, each of a micro-batch on a stage


def figures(schedule: Schedule, slots: Mapping[str, float] | None = None) -> Figures:
    placed = play(schedule, slots or {"F": 1, "B": 2, "I": 1, "W": 1})
    ranks = range(schedule.ranks)
    span = max(end for _, end, *_ in placed)
    busy = [sum(end - start for start, end, rank, *_ in placed if rank == r) for r in ranks]
    own = [max(e for _, e, rank, *_ in placed if rank == r) - min(s for s, _, rank, *_ in placed if rank == r)
           for r in ranks]  # fmt: skip
    peak = []
    for row in schedule.rows:
        live = most = 0
        for action in row:
            live += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
            most = max(most, live)
        peak.append(most)
    return Figures(span, [span - b for b in busy], [o - b for o, b in zip(own, busy, strict=True)], peak)


degrees = st.integers(1, 6), st.integers(1, 14), st.integers(1, 4)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(*degrees)
def test_it_is_valid_and_so_are_its_messages(name: str, p: int, m: int, v: int) -> None:
    """Of any number of ranks, micro-batches (also fewer than ranks, or no multiple of them) and stages per rank."""
    schedule = build_schedule(name, p, m, v)
    held = SCHEDULES[name].stages_per_rank(v)
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (p, p * held, m)
    assert schedule.name == name
    assert all(len(schedule.stages_of(rank)) == held for rank in range(p))
    validate(schedule)
    lowered = lower(schedule)
    check_messages(lowered)
    run_in_order(lowered)
    assert eval(repr(schedule)) == schedule == Schedule(schedule)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(*degrees)
def test_the_bubble_is_what_the_theory_says(name: str, p: int, m: int, v: int) -> None:
    theory = bubble_in_theory(name, p, m, SCHEDULES[name].stages_per_rank(v))
    if theory is not None:
        found = figures(build_schedule(name, p, m, v))
        assert sum(found.idle) / (p * found.span) == pytest.approx(float(theory))


@given(st.integers(1, 6), st.integers(0, 9), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_idle_time_is_what_the_papers_say(p: int, more: int, v: int, f: int, b: int) -> None:
    """Of any F and B = 2 W = 2 I: (p-1)(F+B), and of loops the same, of stages that are 1/v as large."""
    m = p + more
    slots = {"F": f, "B": 2 * b, "I": b, "W": b}
    for name, micro in (("1f1b", m), ("gpipe", m), ("looped_bfs", m), ("interleaved_1f1b", m)):
        assert figures(build_schedule(name, p, micro, v), slots).idle == [(p - 1) * (f + 2 * b)] * p


@given(st.integers(1, 6), st.integers(0, 9), st.integers(1, 4), *[st.integers(0, 4)] * 2)
def test_idle_time_of_zero_bubble_schedules(p: int, more: int, w: int, f_more: int, i_more: int) -> None:
    """Qi et al. 2024, section 2: (p-1)(F+I-W), and (p-1)(F+I-2W) of a rank's own span; of any F and I not below W."""
    f, i = w + f_more, w + i_more
    slots = {"F": f, "B": i + w, "I": i, "W": w}
    for name in ("zb_h1", "interleaved_zb"):
        assert figures(build_schedule(name, p, p + more, 2), slots).idle == [(p - 1) * (f + i - w)] * p
    assert max(figures(build_schedule("zb_h2", p, 2 * p - 1 + more), slots).own_idle) == (p - 1) * (
        f + i - 2 * w
    )
    # DualPipe's README: (p-1)(F&B + B - 3W), with p ranks of two stages each, F&B = F + B; of F = I
    slots |= {"I": f, "B": f + w}
    assert figures(build_schedule("dualpipev", p, 2 * p + more), slots).idle == [(p - 1) * (3 * f - w)] * p


@given(st.integers(1, 6), st.integers(0, 9), st.integers(2, 4))
def test_live_activations_are_what_the_papers_say(p: int, more: int, v: int) -> None:
    m, turns = 2 * p + more, p * (2 + more // 2)
    ranks = range(p)
    assert figures(build_schedule("gpipe", p, m)).peak == [m] * p
    assert figures(build_schedule("1f1b", p, m)).peak == [p - rank for rank in ranks]
    assert figures(build_schedule("looped_bfs", p, m, v)).peak == [v * m] * p
    # Narayanan et al. 2021, section 2.2.2: on rank 0 1 + (p-1)/(pv) times 1F1B's, whose stages are v times as large
    peaks = figures(build_schedule("interleaved_1f1b", p, turns, v)).peak
    assert peaks == [v * p + p - 1 - 2 * rank for rank in ranks]
    assert peaks[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))
    # Megatron's `get_pp_rank_microbatches`: pairs take one more forward in the warm-up
    joint = build_schedule("overlapped_1f1b", p, turns, v)
    assert figures(joint).peak == [peak + 1 for peak in peaks]
    assert len(joint.together) == p * turns * v - sum(peaks)
    assert figures(build_schedule("zb_h1", p, m)).peak == [p] * p
    assert figures(build_schedule("zb_h2", p, m)).peak == [2 * p - 1] * p
    assert figures(build_schedule("interleaved_zb", p, turns, v)).peak == [v * p] * p
    assert figures(build_schedule("zbv", p, m)).peak == [2 * p] * p
    assert figures(build_schedule("dualpipev", p, m)).peak == [2 * p + 1] * p


@given(st.integers(2, 5), st.integers(0, 9), st.integers(2, 3))
def test_micro_batches_that_ranks_do_not_divide(p: int, more: int, v: int) -> None:
    """Turns are as long as they have to be, and the bubble is as small as if p did divide m."""
    m = p + more
    turn = -(-m // (m // p))
    for name, idle in (("interleaved_1f1b", 3 * (p - 1)), ("interleaved_zb", p - 1)):
        found = figures(build_schedule(name, p, m, v))
        assert found.idle == [idle] * p
        assert max(found.peak) <= v * p + p - 1 + (v - 1) * (turn - p)


def test_one_stage_has_pairs_where_the_schedule_has() -> None:
    """Megatron's `combined_1f1b_schedule_for_no_pipelining` of 4 micro-batches, as its docstring has it."""
    plan = Plan(dp=2, ep=2, schedule="overlapped_1f1b", microbatches=4)
    assert plan.build().spelled() == ["0F0 0F1&0B0 0F2&0B1 0F3&0B2 0B3"]
    assert Plan(dp=2, ep=2, schedule="1f1b", microbatches=2).build().spelled() == ["0F0 0B0 0F1 0B1"]


TORCHS = {
    "1f1b": "1F1B", "looped_bfs": "LoopedBFS", "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zb": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip


@pytest.mark.parametrize("name", TORCHS)
def test_orders_are_pytorchs(name: str) -> None:
    """Of those that torch.distributed.pipelining has."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for p in (2, 3, 4, 5):
        least = {"1f1b": p, "dualpipev": 2 * p}.get(name, p - 1)  # with which they have it
        for m in (least, least + 1, 2 * p, 2 * p + 2):
            for v in filter(SCHEDULES[name].can_have, (1, 2, 3)):
                schedule = build_schedule(name, p, m, v)
                for rank, theirs in enumerate(get_schedule_ops(TORCHS[name], p, m, v)):
                    words = [word for entry in theirs if entry is not None for word in _words(entry)]
                    if name == "1f1b" and rank == p - 1:
                        # This list says F1 to Fm for the last rank, which executes F0 to F(m-1).
                        words = [f"{rank}F{int(w.split('F')[1]) - 1}" if "F" in w else w for w in words]
                    assert " ".join(words) == " ".join(map(str, schedule.rows[rank])), (p, m, v, rank)


def _words(entry: Any) -> list[str]:
    """PyTorch's spelling, but for what is together and for its own actions after all backwards."""
    parts = entry.sub_actions or [entry]
    return [str(part) for part in parts if "REDUCE_GRAD" not in str(part)]

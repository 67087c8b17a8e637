"""Schedules are data: drawn, validated, lowered, without a tensor in sight."""

from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.plan.schedule import Schedule, draw, lower, validate
from mpkit.plan.schedule.schedules import gpipe
from mpkit.trace import Kind
from tests.counted import counted
from tests.recipes import sgd
from tests.schedule.orders import valid_schedules
from tests.serial import Clusters


def test_gpipes_staircase() -> None:
    # Huang et al. 2019, figure 2c: F in order, B in reverse order of micro-batches.
    assert [" ".join(map(str, row)) for row in gpipe(4, 3).rows] == [
        "0F0 0F1 0F2 0B2 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0", "2F0 2F1 2F2 2B2 2B1 2B0",
        "3F0 3F1 3F2 3B2 3B1 3B0",
    ]  # fmt: skip
    assert draw(gpipe(2, 2), {"F": 1, "B": 1}).splitlines() == [
        "rank 0 | F0 F1  .  . B1 B0",
        "rank 1 |  . F0 F1 B1 B0  .",
    ]


def test_a_schedule_is_read_from_text_and_prints_what_makes_it_again() -> None:
    rows = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    schedule = Schedule(rows, name="1f1b")
    assert schedule == Schedule(rows.splitlines(), name="1f1b") == eval(repr(schedule))
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (2, 2, 2)
    assert str(schedule) == draw(schedule)
    v_shaped = Schedule(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"])
    assert v_shaped.stage_to_rank == (0, 1, 1, 0)
    assert v_shaped.stages_of(0) == (0, 3)
    assert "3F0" in draw(v_shaped)
    with pytest.raises(ValueError, match=r"'1G0' is no action.*such as 2F0"):
        Schedule(["1G0"])


def test_messages_are_not_written_and_the_arrow_is_under_one() -> None:
    """What else cannot run is in test_broken."""
    with pytest.raises(
        ValueError, match=r"^Schedule 'mine' cannot run: 0SEND_F0 is a message. Write compute only"
    ) as caught:
        validate(Schedule(["0F0 0SEND_F0 0B0", "1F0 1B0"], name="mine"))
    row, arrow = str(caught.value).splitlines()[1:3]
    assert row[arrow.index("^") : arrow.rindex("^") + 1] == "0SEND_F0"


@given(valid_schedules)
def test_random_orders_are_valid_and_lowered_without_deadlock(schedule: Schedule) -> None:
    validate(schedule)
    lowered = lower(schedule)
    compute = [[a for a in row if len(a.kind) == 1] for row in lowered.rows]
    assert tuple(map(tuple, compute)) == schedule.rows, "lowering keeps the order of compute"
    check_messages(lowered)
    run_in_order(lowered)


def check_messages(lowered: Schedule) -> None:
    """Every message once, from the rank that makes it to the one that needs it, never to oneself."""
    holders = lowered.stage_to_rank
    for way, step in (("F", 1), ("B", -1)):
        expected = {
            (s, i)
            for s in range(lowered.stages)
            for i in range(lowered.microbatches)
            if 0 <= s + step < lowered.stages and holders[s] != holders[s + step]
        }
        sent = Counter(
            (a.stage, a.microbatch) for row in lowered.rows for a in row if a.kind == f"SEND_{way}"
        )
        got = Counter(
            (a.stage - step, a.microbatch) for row in lowered.rows for a in row if a.kind == f"RECV_{way}"
        )
        assert sent == got == Counter(dict.fromkeys(expected, 1))


def run_in_order(lowered: Schedule) -> None:
    """Every pair of ranks does its messages, of both directions, in one order, as nccl pairs them by order.

    A message goes when it is the first of its pair on both ranks; a rank's compute waits for what it needs.
    """
    holders = lowered.stage_to_rank
    queues: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for rank, row in enumerate(lowered.rows):
        for a in row:
            if len(a.kind) > 1:
                step = 1 if a.kind.endswith("F") else -1
                source = a.stage if a.kind.startswith("SEND") else a.stage - step
                peer = holders[source + step] if a.kind.startswith("SEND") else holders[source]
                queues.setdefault((rank, peer), []).append((a.kind[-1], source, a.microbatch))
    for (rank, peer), queue in queues.items():
        assert queue == queues[peer, rank], f"ranks {rank} and {peer} disagree on the order"

    assert in_one_order(lowered), "messages of three ranks and more stand in a ring"

    position = [0] * lowered.ranks
    posted: dict[tuple[int, int], list[tuple[str, int, int]]] = {pair: [] for pair in queues}
    arrived: set[tuple[str, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(lowered.rows):
            while position[rank] < len(row):
                a = row[position[rank]]
                if len(a.kind) > 1:
                    step = 1 if a.kind.endswith("F") else -1
                    sends = a.kind.startswith("SEND")
                    source = a.stage if sends else a.stage - step
                    peer = holders[source + step] if sends else holders[source]
                    posted[rank, peer].append((a.kind[-1], source, a.microbatch))
                    mine, theirs = posted[rank, peer], posted[peer, rank]
                    arrived.update(x for x, y in zip(mine, theirs, strict=False) if x == y)
                else:
                    needs = [n for n in lowered.needs(a) if holders[n.stage] != rank]
                    if any((n.kind.replace("I", "B"), n.stage, n.microbatch) not in arrived for n in needs):
                        break
                position[rank] += 1
                moved = True
    assert position == [len(row) for row in lowered.rows], "stuck"


def in_one_order(lowered: Schedule) -> bool:
    """Whether there is one order of all messages that every rank's row follows, as nccl needs where each rank does
    all of its messages, whoever they are with, one after the other."""
    rows = []
    for row in lowered.rows:
        messages = [a for a in row if len(a.kind) > 1]
        steps = [1 if a.kind.endswith("F") else -1 for a in messages]
        rows.append([(a.kind[-1], a.stage if a.kind.startswith("SEND") else a.stage - step, a.microbatch)
                     for a, step in zip(messages, steps, strict=True)])  # fmt: skip
    after = {message: set[object]() for row in rows for message in row}
    for row in rows:
        for first, second in pairwise(row):
            after[second].add(first)
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        return False
    return True


def test_a_receive_is_posted_before_what_runs_while_the_message_comes() -> None:
    lowered = lower(gpipe(2, 3))
    assert " ".join(map(str, lowered.rows[1])).startswith("1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2 1B2")


# ---- Schedules on the clock, against the figures of the papers that introduced them.


def test_gpipe_of_4_stages_and_8_micro_batches() -> None:
    """Huang et al. 2019, section 2.3: F=1, B=2: span 3 (m + p - 1) = 33, idle 3 (p - 1) = 9."""
    t = mk.simulate(mk.Plan.gpipe(4, 8))
    assert t.step_time == 33.0
    assert t.idle == [9.0] * 4
    assert t.busy == [24.0] * 4
    assert t.bubble == pytest.approx(3 / 11)
    assert t.ideal_bubble == pytest.approx(3 / 8)  # Megatron's: (p - 1)/m
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


@pytest.mark.parametrize(("times", "words"), [
    ({"forward": [1, 2]}, r"2 times for 4 stages.*forward=\[1.0, 1.0, 1.0, 1.0\]"),
    ({"weight_grad": -1.0}, "weight_grad=-1.0.*not negative"),
    ({"hop": float("inf")}, "hop=inf.*finite"),
    ({"input_grad": float("nan")}, "input_grad=nan"),
    ({"forward": "fast"}, "forward='fast'.*a number of seconds"),
    ({"forward": None}, "forward=None"),
    ({"forward": [1, 1, 1, "x"]}, "forward='x'"),
    ({"hop": True}, "hop=True"),
])  # fmt: skip
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


# ---- The timeline of real ranks, on a clock that counts FLOPs, is the one that the simulation predicts.

LOOPS = ("looped_bfs", "interleaved_1f1b", "interleaved_zb")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
def test_the_bubble_of_each_step_is_that_of_the_simulation(clusters: Clusters, name: str) -> None:
    """Two linear layers per stage: its inputs' gradients take time in each stage, the first one too."""
    plan = mk.Plan(pp=4, schedule=name, microbatches=8, virtual_stages=2 if name in LOOPS else 1)
    layers = [
        layer for _ in range(plan.stages) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    ]
    data = [(torch.ones(8, 16), torch.zeros(8, 16))]
    plan = mk.Plan(
        pp=4, schedule=name, microbatches=8, virtual_stages=plan.virtual_stages,
        cut=list(range(3, len(layers), 3)),
    )  # fmt: skip
    run = clusters(4).train(nn.Sequential(*layers), data, plan, loss=F.mse_loss, optimizer=sgd, steps=3)
    ran = counted(run.wait().trace)
    simulated = mk.simulate(plan, **ran.stage_times(), steps=3)
    bubbles = [ran.step(step).bubble for step in ran.steps]
    assert bubbles == pytest.approx([simulated.step(step).bubble for step in range(3)], abs=1e-6)
    assert ran.step_time == pytest.approx(simulated.step_time, rel=1e-6)

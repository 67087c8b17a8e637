"""Schedules are data: drawn, validated, lowered, without a tensor in sight."""

from __future__ import annotations

from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given

from mpkit.plan.schedule import Schedule, draw, gpipe, lower, validate
from tests.schedule.orders import valid_schedules


def test_gpipes_staircase() -> None:
    # Huang et al. 2019, figure 2c: F in order, B in reverse order of micro-batches.
    assert [" ".join(map(str, row)) for row in gpipe(4, 3).rows] == [
        "0F0 0F1 0F2 0B2 0B1 0B0",
        "1F0 1F1 1F2 1B2 1B1 1B0",
        "2F0 2F1 2F2 2B2 2B1 2B0",
        "3F0 3F1 3F2 3B2 3B1 3B0",
    ]
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


# ---------------------------------------------------------------- validate


REFUSED = {
    "before what it needs": (
        ["0F0 0F1 0B0 0B1", "1F1 1B1 1B0 1F0"],
        r"1B0 comes before 1F0, which it needs \(a backward needs what its forward kept\)",
        "1B0",
    ),
    "a ring": (
        ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"],
        "rank 0 is at 0B0 and waits for 1B0 of rank 1; rank 1 is at 1F1 and waits for 0F1 of rank 0",
        "0B0",
    ),
    "missing backward": (["0F0 0F1 0B0 0B1", "1F0 1F1 1B1"], "1B0 is missing: .* no gradient", None),
    "half a backward": (["0F0 0F1 0B0 0I1", "1F0 1F1 1B0 1B1"], "0W1 is missing: .* both I and W", None),
    "W before I": (
        ["0F0 0F1 0W0 0I0 0B1", "1F0 1F1 1B0 1B1"],
        r"0W0 comes before 0I0, which it needs \(the gradient of the weights follows",
        "0W0",
    ),
    "a message": (["0F0 0SEND_F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"], "Write compute only", "0SEND_F0"),
    "backwards out of order": (
        ["1F0 0F0 0F1 1F1 1B0 0B0 0B1 1B1"],
        "1F0 comes before 0F0, which it needs .stage 1 computes on what stage 0 makes",
        "1F0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows, words, at", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_run_is_drawn_with_an_arrow(rows: list[str], words: str, at: str | None) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        validate(Schedule(rows, name="mine"), 2, 2)
    message = str(caught.value)
    assert message.startswith("Schedule 'mine' cannot run: ")
    lines = message.splitlines()
    if at is not None:
        arrow = next(i for i, line in enumerate(lines) if set(line) == {" ", "^"})
        column = lines[arrow].index("^")
        assert lines[arrow - 1][column : lines[arrow].rindex("^") + 1].strip() == at


# ---------------------------------------------------------------- lower


@given(valid_schedules)
def test_random_orders_are_valid_and_lowered_without_deadlock(schedule: Schedule) -> None:
    validate(schedule, schedule.stages, schedule.microbatches)
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

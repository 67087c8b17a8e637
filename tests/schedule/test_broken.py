"""Broken schedules: each is refused with a message that names the true fault, and shows the spot."""

import re
from collections.abc import Callable
from random import Random

import pytest

from mpkit.plan.schedule import Action, Schedule, validate
from mpkit.plan.schedule.play import live
from tests.schedule.orders import random_schedule

Rows = list[list[Action]]


def finishes(rows: Rows, needs: Callable[[Action], list[Action]]) -> bool:
    """Whether there is an order of all actions in which each comes after what it needs and what is before it in its
    row: tried one by one, with no thought for times or ranks."""
    left, done, moved = [list(row) for row in rows], set[Action](), True
    while moved:
        moved = False
        for row in left:
            while row and done.issuperset(needs(row[0])):
                done.add(row.pop(0))
                moved = True
    return not any(left)


# ---------------------------------------------------------------- the faults, each with what has to be said


def dropped(random: Random, schedule: Schedule, rows: Rows) -> str:
    rank = random.randrange(len(rows))
    action = rows[rank].pop(random.randrange(len(rows[rank])))
    return f"{action} is missing: "


def doubled(random: Random, schedule: Schedule, rows: Rows) -> str:
    row = random.choice(rows)
    action = random.choice(row)
    row.insert(random.randrange(len(row) + 1), action)
    return f"{action} is there twice"


def on_another_rank(random: Random, schedule: Schedule, rows: Rows) -> str:
    here, there = random.sample(range(len(rows)), 2)
    action = rows[here].pop(random.randrange(len(rows[here])))
    rows[there].insert(random.randrange(len(rows[there]) + 1), action)
    return f"{action} is in rank {there}'s row, but stage {action.stage} is on rank {here}"


def done_whole_and_split(random: Random, schedule: Schedule, rows: Rows) -> str:
    row = random.choice(rows)
    action = random.choice([a for a in row if a.kind != "F"])
    other = action._replace(kind="I" if action.kind == "B" else "B")
    row.insert(random.randrange(len(row) + 1), other)
    return "would do the same work twice"


def before_what_it_needs(random: Random, schedule: Schedule, rows: Rows) -> str:
    """A backward, or W, put somewhere before the forward, or I, of its own stage."""
    row = random.choice(rows)
    action = random.choice([a for a in row if a.kind != "F"])
    need = action._replace(kind="I" if action.kind == "W" else "F")
    row.remove(action)
    row.insert(random.randint(0, row.index(need)), action)
    return ""


def swapped(random: Random, schedule: Schedule, rows: Rows) -> str:
    """Two actions of a rank, until that is one too many."""
    while finishes(rows, schedule.needs):
        row = random.choice(rows)
        a, b = random.randrange(len(row)), random.randrange(len(row))
        row[a], row[b] = row[b], row[a]
    return ""


def crossed(random: Random, schedule: Schedule, rows: Rows) -> str:
    """A rank takes two micro-batches in each other's place, which others may not follow."""
    for _ in range(10):
        rank = random.randrange(len(rows))
        i, j = random.sample(range(schedule.microbatches), 2)
        row = [a._replace(microbatch={i: j, j: i}.get(a.microbatch, a.microbatch)) for a in rows[rank]]
        if sorted(row) == sorted(rows[rank]):  # both have their backwards whole, or both split
            rows[rank] = row
        if not finishes(rows, schedule.needs):
            return ""
    return swapped(random, schedule, rows)


def check_that_it_cannot_finish(message: str, schedule: Schedule) -> None:
    """What the message says proves that nothing can go on: each waits for what comes no earlier than the next's."""
    before = re.search(r"run: (\S+) comes before (\S+), which it needs", message)
    if before is not None:
        action, need = map(Action.parse, before.groups())
        row = schedule.rows[schedule.stage_to_rank[action.stage]]
        assert need in schedule.needs(action) and row.index(action) < row.index(need)
        return
    assert "the ranks wait for each other for ever" in message
    waits = re.findall(r"rank (\d+) is at (\w+) and waits for (\w+) of rank (\d+)", message)
    assert len(waits) > 1
    ring = [(int(r), Action.parse(a), Action.parse(n), int(q)) for r, a, n, q in waits]
    for (rank, action, need, other), (following, at, *_) in zip(ring, ring[1:] + ring[:1], strict=True):
        assert other == following
        assert action in schedule.rows[rank] and need in schedule.needs(action)
        row = schedule.rows[other]
        assert row.index(need) >= row.index(at), "it is not done when the other is stuck"


def check_the_arrow(message: str, action: str) -> None:
    """One of the arrows is under that action."""
    lines = message.splitlines()
    under = [
        lines[at - 1][match.start() : match.end()].strip()
        for at, line in enumerate(lines)
        if set(line) == {" ", "^"}
        for match in re.finditer(r"\^+", line)
    ]
    assert action in under, message


FAULTS = (
    dropped, doubled, on_another_rank, done_whole_and_split,
    before_what_it_needs, swapped, crossed,
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_random_broken_schedules_are_refused_with_the_true_fault(fault: Callable[..., str]) -> None:
    """70 of each, 490 in all."""
    for seed in range(70):
        random = Random(f"{fault.__name__} {seed}")
        good = random_schedule(random, ranks_at_least=2 if fault in (on_another_rank, crossed) else 1)
        validate(good)
        rows = [list(row) for row in good.rows]
        words = fault(random, good, rows)
        bad = Schedule(rows, "mine", good.stage_to_rank)
        with pytest.raises(ValueError, match=r"^Schedule 'mine' cannot run: ") as caught:
            validate(bad)
        message = str(caught.value)
        assert words in message, f"seed {seed}: {words!r} is what is wrong.\n{message}"
        assert "^" in message and all(f"rank {rank} | " in message for rank in range(bad.ranks))
        if not words:
            assert not finishes(rows, bad.needs)
            check_that_it_cannot_finish(message, bad)
        if fault in (doubled, on_another_rank):
            check_the_arrow(message, words.split()[0])


def test_memory_over_the_cap() -> None:
    for seed in range(60):
        random = Random(f"memory {seed}")
        schedule = random_schedule(random)
        peaks = schedule.peak_live
        assert schedule.validate(max_live=peaks) is schedule.validate(max_live=max(peaks)) is schedule
        rank = random.randrange(len(peaks))
        cap = [peak + (1 if r != rank else -0.5) for r, peak in enumerate(peaks)]
        at = next(i for i, held in enumerate(live(schedule.rows[rank])) if held > cap[rank])
        action = schedule.rows[rank][at]
        with pytest.raises(
            ValueError, match=f"at {action} rank {rank} would hold {peaks[rank]} act"
        ) as caught:
            schedule.validate(max_live=cap)
        check_the_arrow(str(caught.value), str(action))


def test_a_ring_through_what_is_together() -> None:
    """What a pair makes leaves when both are done, so 0F1 can not be what its own backward waits for."""
    with pytest.raises(ValueError, match=r"waits for 0F1 of rank 0, which leaves together with 0B1"):
        Schedule("F0 F1&B1 B0 \n F0 F1 B1 B0").validate()
    Schedule("F0 F1&B0 B1 \n F0 B0 F1 B1").validate()

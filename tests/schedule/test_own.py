"""A schedule of the learner's own, in whatever form it is written."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from mpkit import Plan
from mpkit.plan.schedule import NAMES, Action, Schedule, build_schedule

ONE_F_ONE_B = Schedule(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], name="own")


def by_ranks(p: int, m: int) -> Iterator[list[Action]]:
    for rank in range(p):
        ahead = min(p - 1 - rank, m)
        row = [Action("F", rank, i) for i in range(ahead)]
        for i in range(m):
            row += [Action("F", rank, i + ahead)] if i + ahead < m else []
            row += [Action("B", rank, i)]
        yield row


def in_order(p: int, m: int) -> Iterator[Action]:
    for i in range(m):
        yield from (Action("F", stage, i) for stage in range(p))
        yield from (Action("B", stage, i) for stage in reversed(range(p)))


FORMS = {
    "text": "F0 F1 B0 B1\nF0 B0 F1 B1",
    "text with stages": "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
    "some with stages": "F0 0F1 B0 B1\n1F0 B0 F1 B1",
    "rows of text": ["F0 F1 B0 B1", "F0 B0 F1 B1"],
    "a drawing": "rank 0 | F0 F1  . B0 -- B1 --\nrank 1 |  . F0 B0 -- F1 B1 --",
    "with colons": "rank 0: F0 F1 B0 B1\n\n  rank 1: F0 B0 F1 B1\n",
    "rows of words": [["0F0", "0F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]],
    "rows of actions": [list(row) for row in ONE_F_ONE_B.rows],
    "tuples": [[("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)], ONE_F_ONE_B.rows[1]],
    "actions in order": [Action.parse(a) for a in ["0F0", "0F1", "1F0", "1B0", "1F1", "0B0", "1B1", "0B1"]],
    "a generator of rows": (row for row in ["F0 F1 B0 B1", "F0 B0 F1 B1"]),
    "a schedule": ONE_F_ONE_B,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_all_forms_make_the_same_schedule(form: object) -> None:
    schedule = Schedule(form)  # type: ignore[arg-type]
    assert schedule == ONE_F_ONE_B
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    plan = Plan(pp=2, microbatches=2, schedule=schedule)
    assert plan == Plan.from_schedule(schedule) == Plan.from_json(plan.to_json())
    assert plan.build() == schedule


def test_functions() -> None:
    assert Schedule(by_ranks, p=2, m=2) == Schedule(ONE_F_ONE_B.rows, name="by_ranks")
    plan = Plan(pp=3, microbatches=5, schedule=by_ranks)
    assert plan == Plan.from_schedule(by_ranks, pp=3, microbatches=5)
    assert plan.build().rows == build_schedule("1f1b", 3, 5).rows
    assert Plan(pp=3, microbatches=2, schedule=in_order).build().rows == build_schedule("naive", 3, 2).rows
    for back in (
        lambda p, m: "F0 F1 B0 B1\nF0 B0 F1 B1",
        lambda p, m: ONE_F_ONE_B,
        lambda p, m: ONE_F_ONE_B.rows,
    ):
        assert Schedule(back, "own", p=2, m=2) == ONE_F_ONE_B
    for name in NAMES:
        assert Schedule(lambda p, m, name=name: build_schedule(name, p, m, 2), p=3, m=4) == build_schedule(
            name, 3, 4, 2
        )
    with pytest.raises(ValueError, match=r"by_ranks is a function.*Schedule\(by_ranks, p=4, m=8\)"):
        Schedule(by_ranks)
    with pytest.raises(
        ValueError, match=r"by_ranks is a function.*Plan\(pp=4, microbatches=8, schedule=by_ranks\)"
    ):
        Plan.from_schedule(by_ranks)


def test_stages_of_ones_own_placement() -> None:
    rows = ["0F0 1F0 1B0 0B0", "2F0 2B0"]
    assert Schedule(rows).stage_to_rank == (0, 0, 1)
    assert Schedule(["0F0 0B0", "F0 B0"], stage_to_rank=(0, 1)).stages_of(1) == (1,)
    flat = [Action.parse(a) for a in ["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]]
    assert Schedule(flat, stage_to_rank=(0, 0, 1)) == Schedule(rows)
    with pytest.raises(ValueError, match=r"stage_to_rank=\(0, 1\).*3 stages on 3 ranks"):
        Schedule(flat, stage_to_rank=(0, 1))


REFUSED = {
    "a number": (5, "5 is no schedule. Give its rows"),
    "numbers": ([5], "Rank 0's row is 5; it is text"),
    "an unknown kind": ("F0 G0", "'G0' is no action"),
    "an unknown kind of Action": ([[Action("G", 0, 0)]], "0G0 in rank 0's row is no action"),
    "a negative stage": ([[Action("F", -1, 0)]], "-1F0 in rank 0's row is no action.*counted from 0"),
    "a number among actions": ([["F0", 3]], "3 in rank 0's row is no action"),
    "no stage of several": (["0F0 3F0 F1"], "'F1': of which stage. Rank 0 holds stages 0 and 3: 0F1"),
    "two forwards together": (["F0&F1"], "'F0&F1': a forward runs together with one backward after it"),
    "three together": (["F0&B1&B2"], "runs together with one backward"),
}


@pytest.mark.parametrize(("given_", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_schedule_says_why(given_: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(given_)  # type: ignore[arg-type]

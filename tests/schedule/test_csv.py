"""Pipeline schedules to and from torch's CSV, read and checked by torch's own code."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from mpkit.plan.schedule import NAMES, Schedule, build_schedule

PLANS = st.tuples(
    st.sampled_from(sorted(NAMES)),
    st.sampled_from([2, 4]),
    st.sampled_from([4, 8, 12]),
    st.sampled_from([1, 2]),
)


def made(name: str, p: int, m: int, v: int) -> Schedule | None:
    """The schedule, or None where there is none of these sizes."""
    try:
        return build_schedule(name, p, m, v)
    except ValueError:
        return None


def torch_rows(text: str) -> dict[int, list[Any]]:
    """What torch reads from a file with this text."""
    lines = list(csv.reader(text.splitlines()))
    return {
        rank: [torch_schedules._Action.from_str(field) for field in row] for rank, row in enumerate(lines)
    }


@given(PLANS)
def test_a_schedule_survives_the_round_trip(plan: tuple[str, int, int, int]) -> None:
    schedule = made(*plan)
    if schedule is not None:
        back = Schedule.from_csv(schedule.to_csv(), schedule.name)
        assert (back.rows, back.together) == (schedule.rows, schedule.together)


@given(PLANS)
def test_torch_reads_the_same_actions_and_accepts_them(plan: tuple[str, int, int, int]) -> None:
    schedule = made(*plan)
    if schedule is None or schedule.name == "naive":
        return
    rows = torch_rows(schedule.to_csv())
    flat = {
        rank: [str(one) for action in row for one in (action.sub_actions or [action])]
        for rank, row in rows.items()
    }
    assert flat == {rank: [str(action) for action in row] for rank, row in enumerate(schedule.rows)}
    if not schedule.together:
        torch_schedules._validate_schedule(rows, len(schedule.rows), schedule.stages, schedule.microbatches)


def test_a_file_that_torch_wrote(tmp_path: Path) -> None:
    """With idle slots, sharding and communication; what mpkit writes from it is read again."""
    path = tmp_path / "mine.csv"
    path.write_text(
        "0UNSHARD,0F0,0SEND_F0,0F1,,0RECV_B0,0B0,0B1,0RESHARD\n,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1\n"
    )
    schedule = Schedule.from_csv(path)
    assert schedule.spelled() == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert schedule.name == "mine"
    assert Schedule.from_csv(str(path)).rows == schedule.rows
    assert schedule.to_csv(tmp_path / "again.csv") == (tmp_path / "again.csv").read_text()
    assert Schedule.from_csv(tmp_path / "again.csv").rows == schedule.rows

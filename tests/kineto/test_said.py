"""What is said of an imported trace: by the numbers that the program gave its ranks, of whole steps only."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpkit as mk
from tests.kineto.program import ddp_program, write_ranks


def test_texts_name_a_rank_by_its_own_number(tmp_path: Path) -> None:
    """The only file is of rank 3: no text calls it rank 0."""
    timeline = mk.open(write_ranks(tmp_path, [ddp_program(3, 4)])).timeline()
    found = timeline.diagnose()
    words = [str(timeline.critical_path()), *(each.words for each in found)]
    assert "It is on rank 3 100" in words[0]
    assert not any("ank 0" in each for each in words)


def test_a_rank_without_a_number_is_not_called_0(tmp_path: Path) -> None:
    program = ddp_program(0, 1)
    program.header["distributedInfo"] = {"backend": "nccl"}
    write_ranks(tmp_path, [program])
    path = (tmp_path / "rank0.json").rename(tmp_path / "trace.json")
    timeline = mk.open(path).timeline()
    assert "rank ? · forward" in str(timeline.critical_path())


@pytest.mark.parametrize("cut", [0.05, 0.4])
def test_a_step_within_which_recording_ended_is_left_out(tmp_path: Path, cut: float) -> None:
    program = ddp_program(0, 1, steps=3)
    begins = max(event["ts"] for event in program.events if event.get("name", "").startswith("ProfilerStep"))
    end = begins + 2000 * cut * 0.45
    program.events = [event for event in program.events if event["ts"] < end]
    for event in program.events:
        if event.get("name", "") == "ProfilerStep#5":
            event["dur"] = end - begins
    trace = mk.open(write_ranks(tmp_path, [program]))
    assert trace.timeline().steps == [3, 4]
    assert any("Step 5 of rank 0 was cut off after" in note for note in trace.notes), trace.notes
    whole = mk.open(write_ranks(tmp_path / "whole", [ddp_program(0, 1, steps=3)]))
    assert whole.timeline().steps == [3, 4, 5]

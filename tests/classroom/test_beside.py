"""The table that silent bugs are found by."""

from __future__ import annotations

import pytest

import mpkit as mk
from mpkit.course.catalogue import ExerciseEntry, of_family
from mpkit.course.framework.source import run_cell
from mpkit.course.serial_comparison import BesideSerial

ENTRIES = of_family("silent_bugs")
BUGS = [
    pytest.param(entry, id=entry.name, marks=() if entry is ENTRIES[0] else pytest.mark.soak)
    for entry in ENTRIES
]


def table(entry: ExerciseEntry, code: str) -> BesideSerial:
    return mk.beside_serial(
        entry.name, run_cell(code, entry.exercise.name_of_answer, "cell", entry.given_code)
    )


@pytest.mark.parametrize("entry", BUGS)
def test_a_silent_bug_is_silent_and_the_table_shows_it(entry: ExerciseEntry) -> None:
    frame = table(entry, entry.source.stub).frame
    for name in frame.filter(like="loss, rank"):
        losses = frame[name].astype(float).tolist()
        assert losses[-1] < losses[0], "the loss falls"
    assert (frame["weights that differ after it, by"] != "none").all()


@pytest.mark.parametrize("entry", BUGS)
def test_a_mended_program_is_serial_training(entry: ExerciseEntry) -> None:
    frame = table(entry, entry.source.solution).frame
    assert (frame["weights that differ after it, by"] == "none").all(), str(frame)
    assert all((frame[name] == frame["loss, serial"]).all() for name in frame.filter(like="loss, rank"))


def test_what_can_not_be_compared_says_what_can() -> None:
    with pytest.raises(ValueError, match="did you mean 'the-loader'"):
        mk.beside_serial("the-lodaer", print)
    with pytest.raises(ValueError, match=r"mk.beside_serial\('the-loader', train\)"):
        mk.beside_serial("the-loader")
    with pytest.raises(ValueError, match="trains nothing"):
        mk.beside_serial("pass-the-token", print)
    with pytest.raises(mk.RankFailed, match="ZeroDivisionError"):
        mk.beside_serial("the-loader", lambda *_: 1 / 0)
    with pytest.raises(mk.errors.Deadlock, match="wait"):
        mk.beside_serial("the-loader", lambda ctx, *_: ctx.comm.barrier() if ctx.rank else [])

"""The schedule explorer: what its sliders, dropdowns, text and buttons do."""

from __future__ import annotations

import pytest

import mpkit as mk


def test_sliders_move_both_sides_on_one_axis() -> None:
    explorer = mk.explore("gpipe", "zb_h1", ranks=3, microbatches=4)
    gpipe, zero_bubble = explorer.sides
    assert gpipe.view.step_time == 18
    assert "<b>4</b> peak activations" in gpipe.figures.value
    before = zero_bubble.figures.value
    explorer.sliders["microbatches"].value = 12
    assert gpipe.view.step_time == 42  # (m + p - 1)(F + B)
    assert zero_bubble.figures.value != before
    assert gpipe.view.room == zero_bubble.view.room == pytest.approx(42)
    gpipe.schedule.value = "naive"
    assert gpipe.view.room == zero_bubble.view.room == pytest.approx(3 * 12 * 3)


def test_rows_can_be_edited() -> None:
    explorer = mk.explore("gpipe", ranks=2, microbatches=2)
    (side,) = explorer.sides
    assert side.rows.value == "0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0"
    side.rows.value = "F0 F1 B0 B1\nF0 B0 F1 B1"
    side.apply.click()
    assert side.schedule.value == "your own"
    assert side.view.step_time == 9


def test_what_cannot_run_says_why_and_its_picture_is_marked_as_that_of_an_earlier_setting() -> None:
    explorer = mk.explore("gpipe", "1f1b", ranks=2, microbatches=2)
    side, other = explorer.sides
    side.rows.value = "F0 F1 B0 B1\nB0 F0 F1 B1"
    side.apply.click()
    assert "1B0 comes before 1F0" in side.problem.value
    assert side.stale and not other.stale
    # No figure speaks of the schedule before.
    assert side.view.step_time is side.view.bubble is None and side.figures.value == ""
    assert "not of what is set now" in side.view.note and side.view.stale
    explorer.sliders["forward"].value = 2.0  # the other side follows; this one still cannot
    assert side.view.step_time is None and other.view.step_time == 12
    side.schedule.value = "1f1b"
    assert side.problem.value == side.view.note == "" and side.view.step_time == 12
    assert not side.view.stale

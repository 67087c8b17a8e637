"""A timeline as plain text."""

from __future__ import annotations

import pytest

import mpkit as mk
from mpkit.views.timeline.text import text

STAIRCASE = """\
GPU 0 │0░1░2░3░4░5░6░7░··················7▓▓▓6▓▓▓5▓▓▓4▓▓▓3▓▓▓2▓▓▓1▓▓▓0▓▓▓│ idle 27.3 %
GPU 1 │··0░1░2░3░4░5░6░7░············7▓▓▓6▓▓▓5▓▓▓4▓▓▓3▓▓▓2▓▓▓1▓▓▓0▓▓▓····│ idle 27.3 %
GPU 2 │····0░1░2░3░4░5░6░7░······7▓▓▓6▓▓▓5▓▓▓4▓▓▓3▓▓▓2▓▓▓1▓▓▓0▓▓▓········│ idle 27.3 %
GPU 3 │······0░1░2░3░4░5░6░7░7▓▓▓6▓▓▓5▓▓▓4▓▓▓3▓▓▓2▓▓▓1▓▓▓0▓▓▓············│ idle 27.3 %
       0                                                           33.0 s
░ forward  ▓ backward  · idle
bubble 27.3 % · step time 33.0 s · simulated: from the schedule alone, nothing was run"""


def test_gpipes_staircase() -> None:
    assert text(mk.simulate(mk.Plan.gpipe(4, 8)), 100) == STAIRCASE


@pytest.mark.parametrize("width", [40, 61, 80, 200])
def test_no_line_of_the_picture_is_wider_than_asked(gpipe: mk.Timeline, width: int) -> None:
    lines = text(gpipe, width).splitlines()
    assert max(map(len, lines[:5])) <= width


def test_what_communicates_has_a_line_when_nothing_else_is_there(data_parallel: mk.Timeline) -> None:
    assert "comm" not in text(data_parallel, 100).split("\n")[1]
    alone = mk.Timeline(
        data_parallel.spans[data_parallel.spans["lane"] == 1], [""], data_parallel.held, 2, "virtual", {}
    )
    assert "━" in text(alone, 100)

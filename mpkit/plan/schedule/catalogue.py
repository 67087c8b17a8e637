"""The schedules by name: how each is built, and all that is known of it. No other module spells their names.

A function in `schedules` and a row of schedules.toml are all that a new schedule needs: it runs, and is drawn,
predicted, exported and advised.

>>> SCHEDULES["zbv"].title, SCHEDULES["zbv"].torchs
('ZB-V', 'ZBVZeroBubble')
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpkit.plan.schedule import schedules
from mpkit.plan.schedule.core import Schedule

__all__ = [
    "GPIPE", "INTERLEAVED_1F1B", "NAIVE", "NAMES", "ONE_F_ONE_B", "OVERLAPPED_1F1B", "SCHEDULES", "ZB_H1",
    "ScheduleEntry", "build_schedule", "has_pairs", "names_in_torch",
]  # fmt: skip

NAIVE, GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, ZB_H1 = "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"
"""The names of schedules that others are compared with or that Plans have by default."""
OVERLAPPED_1F1B = "overlapped_1f1b"
"""The name of the schedule of pairs that a model in one stage has too."""

ANY = 0
"""In an entry: a rank can have any number of stages."""


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule of the catalogue: how it is built for p ranks, m micro-batches and v stages per rank, and its row.

    schedules.toml says what the columns are.
    """

    build: Callable[[int, int, int], Schedule]
    title: str
    words: str
    per_rank: int = 1
    holds_all: bool = False
    idle: int | None = None
    drains: bool = False
    filled: float = 1
    pairs: bool = False
    advised: Sequence[int] = ()
    torchs: str = ""

    def stages_per_rank(self, v: int) -> int:
        """Return the stages per rank if v are asked for."""
        return self.per_rank or v

    def can_have(self, v: int) -> bool:
        """Return whether a rank can have v stages; a schedule with any number is another one if they are 1."""
        return v > 1 if self.per_rank == ANY else v == self.per_rank


def _entry(name: str, row: dict[str, Any]) -> ScheduleEntry:
    function = getattr(schedules, row.pop("build", name))
    takes_stages = row.get("per_rank") == ANY
    return ScheduleEntry(function if takes_stages else lambda p, m, v: function(p, m), **row)


SCHEDULES: dict[str, ScheduleEntry] = {
    name: _entry(name, row)
    for name, row in tomllib.loads(Path(__file__).with_name("schedules.toml").read_text("utf-8")).items()
}
"""By the name for `Plan(schedule=...)`."""

NAMES = tuple(SCHEDULES)
"""The names of the literature's schedules."""


def names_in_torch() -> dict[str, str]:
    """Return what torch and torchtitan call the schedules that they have, by their names here."""
    return {name: entry.torchs for name, entry in SCHEDULES.items() if entry.torchs}


def has_pairs(schedule: str | Schedule) -> bool:
    """Return whether a schedule has forwards that run as one with a backward.

    >>> has_pairs("dualpipev"), has_pairs(Schedule(["F0&B1", "F0"])), has_pairs("1f1b")
    (True, True, False)
    """
    return bool(schedule.together) if isinstance(schedule, Schedule) else SCHEDULES[schedule].pairs


def build_schedule(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Build the schedule with this name, for p ranks with v stages each and m micro-batches.

    >>> print(build_schedule("1f1b", 2, 3))
    rank 0 | F0 F1  .  . B0 -- F2 B1 --  . B2 --
    rank 1 |  . F0 B0 -- F1 B1 -- F2 B2 --  .  .
    """
    return SCHEDULES[name].build(p, m, v)
